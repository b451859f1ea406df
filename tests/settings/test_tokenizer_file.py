"""A model's other files may name a class of transformers that does otherwise than tokenizer.json says."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.settings.tokenizer_file import first_difference, tokenizer_of_file

TEXTS = (
    "Hello world, how are you?\n日本語 👋",
    "x = 1234567 + 0.5  # it's <|end|>\r\n\t done ",
    "  two spaces, <|end|><|end|> and a letter\u0301",
)


def byte_level(digits: int = 1) -> Tokenizer:
    """A small byte-level tokenizer, trained on a few lines, that splits numbers after so many digits."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"\d{{1,{digits}}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator([*TEXTS, "0 12 123 1234 12345" * 9], trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return backend


def save(directory: Path, backend: Tokenizer, model_type: str, tokenizer_class: str | None) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    if tokenizer_class is not None:
        config["tokenizer_class"] = tokenizer_class
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def test_ids_and_text_are_those_of_the_file(subtests, tmp_path_factory):
    """Which class does so differs between releases of transformers; what the file says does not."""
    for model_type, tokenizer_class in [
        ("llama", "LlamaTokenizer"),
        ("llama", "LlamaTokenizerFast"),
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen2", "LlamaTokenizer"),
        ("llama", "GPT2Tokenizer"),
        ("llama", None),
    ]:
        with subtests.test(model_type=model_type, tokenizer_class=tokenizer_class):
            tmp_path = tmp_path_factory.mktemp("case")
            file = byte_level(digits=3)
            directory = save(tmp_path, file, model_type, tokenizer_class)
            tokenizer = tokenizer_of_file(AutoTokenizer.from_pretrained(str(directory)), directory)
            for text in TEXTS:
                ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
                assert ids == file.encode(text, add_special_tokens=False).ids
                assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
            assert tokenizer.eos_token_id == file.token_to_id("<|end|>")
            said = [{"role": "user", "content": "Hi"}]
            assert tokenizer.apply_chat_template(said, tokenize=False) == "Hi<|end|>"


def test_a_class_that_does_otherwise_is_left_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen 2's splits off each digit, in every release so far."""
    directory = save(tmp_path, byte_level(digits=3), "qwen2", "Qwen2Tokenizer")
    loaded = AutoTokenizer.from_pretrained(str(directory))
    with caplog.at_level(logging.WARNING):
        tokenizer = tokenizer_of_file(loaded, directory)
    assert tokenizer is not loaded
    [line] = [record.getMessage() for record in caplog.records if "tokenizer_file" in record.getMessage()]
    assert "instead_of=Qwen2Tokenizer" in line and "1234567" in line


def test_a_class_that_does_as_the_file_says_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That class may know of its special tokens what no file says."""
    first = save(tmp_path, byte_level(), "qwen2", "Qwen2Tokenizer")
    AutoTokenizer.from_pretrained(str(first)).backend_tokenizer.save(str(first / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(str(first))
    assert type(loaded) is not PreTrainedTokenizerFast
    assert tokenizer_of_file(loaded, first) is loaded
    assert not caplog.records


def test_tokens_that_the_config_alone_has_are_no_difference(tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level(), "llama", "PreTrainedTokenizerFast")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    size = byte_level().get_vocab_size()
    config["added_tokens_decoder"] = {str(size): {"content": "<|more|>", "special": True}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(str(directory))
    assert tokenizer_of_file(loaded, directory) is loaded
    assert loaded.encode("<|more|>", add_special_tokens=False) == [size]


def test_a_decoder_alone_is_a_difference() -> None:
    one, other = byte_level(), byte_level()
    assert first_difference(one, other) is None
    one.decoder = decoders.Fuse()
    assert first_difference(one, other) is not None
