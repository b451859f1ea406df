"""This module makes a tokenizer of a GGUF file's metadata, and the configurations that go with it.

The file only names how its tokenizer splits a text (tokenizer.ggml.pre). llama.cpp has a regular expression
for each name (src/llama-vocab.cpp), and so have the models' own tokenizers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.model.gguf import Metadata, count, list_of, special_ids, text_of, tokens_of
from services.values.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4  # These are values of tokenizer.ggml.token_type.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = {"eos": "eos", "eot": "eot"}
# It separates words, up to so many digits, punctuation, line ends and spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN, _LLAMA = ("qwen2", "deepseek-r1-qwen"), ("llama-bpe", "llama3", "llama-v3")
_SPLIT_BY_WORDS = {**dict.fromkeys(_QWEN, _WORDS % ""), **dict.fromkeys(_LLAMA, _WORDS % "{1,3}")}


def token_ids(metadata: Metadata) -> dict[str, Any]:
    known = special_ids(metadata, _SPECIAL)
    return {f"{name}_token_id": known[name] for name in ("bos", "eos", "pad") if name in known}


def generation_ids(metadata: Metadata) -> dict[str, Any]:
    """Return the special tokens of generation_config.json: a turn's end ends an answer, too."""
    ends = [*dict.fromkeys(special_ids(metadata, _ENDS).values())]
    return {**token_ids(metadata), **({"eos_token_id": ends} if len(ends) > 1 else {})}


def tokenizer_config(metadata: Metadata) -> Mapping[str, Any]:
    tokens, template = tokens_of(metadata), text_of(metadata, "tokenizer.chat_template")
    names = {f"{name}_token": tokens[id_] for name, id_ in special_ids(metadata, _SPECIAL).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": count(metadata, "context_length"),
        **names,
        **({"chat_template": template} if template else {}),
    }


def tokenizer_of(metadata: Metadata) -> Tokenizer:
    kind, splits = (text_of(metadata, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2":
        raise ConfigError(
            f"the GGUF file's tokenizer is of the kind {kind!r}; only gpt2 (byte-level BPE) can be read"
        )
    tokens, merges = tokens_of(metadata), list_of(metadata, "tokenizer.ggml.merges", str)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ConfigError("the GGUF file is damaged: a token stands twice in its tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(ids, pairs, ignore_merges=splits in _LLAMA))
    tokenizer.pre_tokenizer = _splitting(splits)
    if splits in _QWEN:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, list_of(metadata, "tokenizer.ggml.token_type", int))
    if (first_id := _first_id(metadata, splits)) is not None:
        first = tokens[first_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, first_id)]
        )
    return tokenizer


def _first_id(metadata: Metadata, splits: str) -> int | None:
    """Return the token that precedes each text, or None; llama.cpp adds one for Llama 3 by default."""
    adds = metadata.get("tokenizer.ggml.add_bos_token")
    if not isinstance(adds, bool | None):
        raise ConfigError(f"the GGUF file is damaged: its add_bos_token is {adds!r}, not true or false")
    first_id = special_ids(metadata, {"bos": "bos"}).get("bos")
    if adds and first_id is None:
        raise ConfigError("the GGUF file is damaged: it adds a bos token and names none")
    return first_id if adds or (adds is None and splits in _LLAMA) else None


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    for is_special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        found = [token for token, kind in zip(tokens, types, strict=False) if kind == wanted]
        added = [AddedToken(token, normalized=False, special=is_special) for token in found]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)


def _bpe(vocabulary: dict[str, int], merges: list[Any], ignore_merges: bool) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, ignore_merges=ignore_merges)
    except Exception as error:  # tokenizers has no exception class of its own.
        raise ConfigError(f"the GGUF file's merges do not fit its tokens: {error}") from error


def _splitting(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in _SPLIT_BY_WORDS:
        words = pre_tokenizers.Split(Regex(_SPLIT_BY_WORDS[name]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, as_bytes])
    known = ", ".join(("gpt-2", "smollm", *_SPLIT_BY_WORDS))
    raise ConfigError(f"the GGUF file's tokenizer splits texts as {name!r}; read are {known}")
