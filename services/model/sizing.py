"""A value of KV takes so many bytes, and a pool holds so many conversations. This module is pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.values.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is about text: all of it, where it names none.

    Raises ConfigError.
    """
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ConfigError(f"config.json's text_config is no object: {text!r}")
    return text or config


def kv_dtype(config: Mapping[str, Any]) -> str:
    """Return the type of the weights, which KV has, too, unless told otherwise. Raises ConfigError."""
    parts = (config, text_part(config))
    name = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if not isinstance(name, str) or name not in ITEM_BYTES:
        raise ConfigError(f"config.json names dtype {name!r}; say --dtype={'|'.join(ITEM_BYTES)}")
    return name


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool has the KV of one rank.

    A conversation of `context_tokens` takes whole pages of `page_size` tokens.
    """

    token_bytes: int
    page_size: int
    context_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def conversation_pages(self) -> int:
        return -(-self.context_tokens // self.page_size)

    def pages_in(self, size_bytes: float) -> int:
        return int(size_bytes // self.page_bytes)

    def pages_for(self, conversations: int, ranks: int) -> int:
        """Return the pages that each rank needs when the conversations are spread evenly."""
        return -(-conversations // ranks) * self.conversation_pages

    def conversations_in(self, pages: int) -> int:
        return pages // self.conversation_pages
