"""Texts that an answer must not contain become the ids that it would say them by. Pure, given a tokenizer."""

from collections.abc import Iterable, Iterator
from typing import Protocol

_BLANK = " "

Ids = tuple[int, ...]


class TextEncoder(Protocol):
    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...


def banned_ids(tokenizer: TextEncoder, words: Iterable[str]) -> tuple[Ids, ...]:
    """Encode each word as at a text's beginning and as behind a blank, like vLLM's bad_words. Where one way
    of writing ends with another, the shorter one bans both."""
    written = dict.fromkeys(ids for word in words for ids in _written(tokenizer, word))
    lengths = {len(ids) for ids in written}  # a word of a thousand ids has too many ends
    return tuple(ids for ids in written if not any(ids[-n:] in written for n in lengths if n < len(ids)))


def _written(tokenizer: TextEncoder, word: str) -> Iterator[Ids]:
    bare = word.lstrip(_BLANK) or word
    for text in (bare, _BLANK + bare):
        if ids := tokenizer.encode(text, special_tokens=False):
            yield tuple(ids)
