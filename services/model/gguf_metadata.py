"""A GGUF file states this of itself, by key; a value of another type than is due is refused by its name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.values.errors import ConfigError

Metadata = Mapping[str, Any]

_KINDS: Mapping[type, str] = {str: "texts", int: "whole numbers"}


def tokens_of(metadata: Metadata) -> Sequence[str]:
    tokens: Sequence[str] = list_of(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ConfigError("the GGUF file has no tokens (tokenizer.ggml.tokens)")
    return tokens


def special_ids(metadata: Metadata, names: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of special tokens that the file states; `names` are its own, by ours."""
    num_tokens = len(tokens_of(metadata))
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names.items()}
    known = {name: metadata[key] for name, key in keys.items() if key in metadata}
    if wrong := [keys[name] for name, id_ in known.items() if not (_is_count(id_) and id_ < num_tokens)]:
        raise ConfigError(f"the GGUF file is damaged: {wrong[0]} is none of its {num_tokens} tokens")
    return known


def list_of(metadata: Metadata, key: str, kind: type) -> Sequence[Any]:
    values = metadata.get(key, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ConfigError(f"the GGUF file is damaged: its {key} is no list of {_KINDS[kind]}")
    return values


def text_of(metadata: Metadata, key: str) -> str:
    value = metadata.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"the GGUF file is damaged: its {key} is no text")
    return value


def number(metadata: Metadata, name: str, default: float | None = None) -> float:
    """Return a number that is stated under the name of the model's family."""
    key = _key(metadata, name)
    value = metadata.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"the GGUF file's {key} is {value!r}, not a number")
    return float(value)


def count(metadata: Metadata, name: str, default: int | None = None) -> int:
    key = _key(metadata, name)
    value = metadata.get(key, default)
    if not _is_count(value):
        raise ConfigError(f"the GGUF file's {key} is {value!r}, not a whole number")
    return int(value)


def _key(metadata: Metadata, name: str) -> str:
    return f"{metadata['general.architecture']}.{name}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
