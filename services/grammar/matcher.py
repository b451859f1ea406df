"""A matcher knows how far one answer has come in what its constraint allows."""

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.values.errors import InvalidRequest

_ONE_OF = (
    "a value might be valid in several branches of a oneOf; give the branches different types, or a property "
    "that they require with another const or enum in each, or write anyOf"
)
_OTHERWISE = "the answer cannot go on as its constraint has it"


class EndingIds:
    """These ids end an answer; they are kept as bits of a mask's words (masks.py)."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self.token_ids = frozenset(token_id for token_id in token_ids if token_id < vocab_size)
        bits: dict[int, int] = {}
        for token_id in self.token_ids:
            bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
        self._indices = np.fromiter(bits.keys(), np.int64, len(bits))
        self._bits = np.fromiter(bits.values(), np.uint32, len(bits)).view(np.int32)

    def allow_where_whole(self, words: NDArray[np.int32], vocab_size: int) -> None:
        """Allow them in each row whose text is whole.

        The bit behind the vocabulary, which says that the text is whole, is taken off.
        """
        word, bit = vocab_size // 32, np.uint32(1 << vocab_size % 32).view(np.int32)
        for row in words:
            is_whole = bool(row[word] & bit)
            row[word] &= ~bit
            if is_whole:
                row[self._indices] |= self._bits
            else:
                row[self._indices] &= ~self._bits


class Matcher:
    """A matcher follows one sequence, for one thread at a time.

    The ids that end an answer are none of its text, and no matcher is told of them.
    """

    def __init__(self, inner: LLMatcher, ends: EndingIds) -> None:
        self.inner = inner
        self.ends = ends

    def __repr__(self) -> str:
        return f"Matcher(complete={self.is_complete} problem={self.problem!r})"

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequest, and change nothing, where the ids do not follow."""
        if token_ids and not self.inner.consume_tokens(list(token_ids)):
            raise InvalidRequest(f"sampling.constraint: {self.problem}")

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of the ids, from the first on, may follow one another. Changes nothing."""
        fitting: int = self.inner.validate_tokens(list(token_ids))
        return fitting

    def num_drafts_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many drafts can be verified.

        A draft that ends the answer by itself is not counted, otherwise it is as `num_fitting`.
        """
        fitting = self.num_fitting(token_ids)
        if fitting and not self.ends.token_ids:
            after = self.copy()
            after.advance(token_ids[:fitting])
            fitting -= after.is_complete
        return fitting

    def may_choose(self, token_id: int) -> bool:
        if token_id in self.ends.token_ids:
            return bool(self.inner.is_accepting())
        return self.num_fitting((token_id,)) == 1

    @property
    def ends_here(self) -> bool:
        """Tell whether the text is whole, nothing may follow, and there is no id to say so."""
        return not self.ends.token_ids and self.is_complete

    @property
    def is_complete(self) -> bool:
        return bool(self.inner.is_stopped() and not self.inner.is_error())

    @property
    def problem(self) -> str:
        """Say why nothing may follow though the text is not whole."""
        return sentence_of(self.inner.get_error()) or _OTHERWISE

    def copy(self) -> "Matcher":
        return Matcher(self.inner.deep_copy(), self.ends)


def sentence_of(message: str) -> str:
    """Return llguidance's message on one line.

    What it prints of its state and of the grammar is left out, and so are its own options, which no client
    can set.
    """
    if "coerce_one_of" in message:
        return _ONE_OF
    for extra in ("<state>", "<non-verbose/>", "\n   1 | "):
        message = message.partition(extra)[0]
    return " ".join(message.split())
