"""Model directories with one tokenizer of each family, built here: no network, no checkpoint."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from services.router.text.tokenizer import Tokenizer

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é", "ß", "語", "👋"]
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'forbidden' %}{{ raise_exception('no such talk') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thinking>{% endif %}"
    "{% if level is defined %}<{{ level }}>{% endif %}"
    "{% if divisor is defined %}{{ 1 / divisor }}{% endif %}"
)


def save_tokenizer(directory: Path, backend: BackendTokenizer, template: str | None = TEMPLATE) -> Path:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def character_backend() -> BackendTokenizer:
    vocab = {character: index for index, character in enumerate(["<unk>", *CHARACTERS])}
    backend = BackendTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def byte_backend() -> BackendTokenizer:
    """Id i is byte i. GPT-2's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    backend = BackendTokenizer(models.BPE({symbol: byte for byte, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_backend() -> BackendTokenizer:
    """As Llama 2's: words begin with U+2581, what is not in the vocabulary goes byte by byte."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", *fallback, "▁", "▁a", "▁b", *"abcdefghijklmnopqrstuvwxyz"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    backend = BackendTokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="session")
def character_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tokenizer(tmp_path_factory.mktemp("characters"), character_backend())
    (directory / "config.json").write_text(json.dumps({"vocab_size": 128, "eos_token_id": 101}))
    return directory


@pytest.fixture(scope="session")
def character_tokenizer(character_model: Path) -> Tokenizer:
    return Tokenizer(str(character_model))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(save_tokenizer(tmp_path_factory.mktemp("bytes"), byte_backend())))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentencepiece")
    return Tokenizer(str(save_tokenizer(directory, sentencepiece_backend(), template=None)))
