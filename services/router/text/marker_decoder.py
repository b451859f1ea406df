"""The text of ids for a parser: as a client sees it, but with the special tokens that are markers to it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.router.text.byte_pieces import Pieces


class SpecialTokens(Protocol):
    """Tokenizer's side of it."""

    @property
    def all_pieces(self) -> Pieces | None:
        """The bytes of each id, special tokens' too; None: text is more than these."""

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The text of each, by its id."""

    def is_silent(self, token_id: int) -> bool: ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """With special tokens written out."""


class MarkerDecoder:
    """A detokenizer.TokenDecoder. `is_marker` says it of a special token's text."""

    def __init__(self, tokenizer: SpecialTokens, is_marker: Callable[[str], bool]) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(
            token_id for token_id, text in tokenizer.special_tokens.items() if is_marker(text)
        )
        pieces = tokenizer.all_pieces
        self._pieces = pieces and pieces.without(tokenizer.special_tokens.keys() - self._shown)

    @property
    def pieces(self) -> Pieces | None:
        return self._pieces

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.text_of(token_ids)

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        is_silent, shown = self._tokenizer.is_silent, self._shown
        return [token_id for token_id in token_ids if token_id in shown or not is_silent(token_id)]
