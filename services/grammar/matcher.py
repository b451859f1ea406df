"""A matcher follows one answer through the text that its constraint allows.

The bits of masks are the tokens that may come next, with one row for each token that a step chooses. Without
drafts row 0 follows the sequence. With drafts d1 d2, row 0 follows the sequence, row 1 follows d1, and row 2
follows d1 d2.

The ids that end an answer are allowed where its text is complete, and nowhere else. In a row without any bit
the text is not complete, and no token continues it.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from services.values.errors import InvalidRequest

_ONE_OF = (
    "a value might be valid in several branches of a oneOf; give the branches different types, or a property "
    "that they require with another const or enum in each, or write anyOf"
)
_OTHERWISE = "the answer cannot go on as its constraint has it"


class EndingIds:
    """These ids end an answer; they are stored as bits of a mask's words."""

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        self.token_ids = frozenset(token_id for token_id in token_ids if token_id < vocab_size)
        bits: dict[int, int] = {}
        for token_id in self.token_ids:
            bits[token_id // 32] = bits.get(token_id // 32, 0) | 1 << token_id % 32
        self._indices = np.fromiter(bits.keys(), np.int64, len(bits))
        self._bits = np.fromiter(bits.values(), np.uint32, len(bits)).view(np.int32)

    def allow_where_whole(self, words: NDArray[np.int32], vocab_size: int) -> None:
        """Allow the ids in each row whose text is complete.

        This clears the bit after the vocabulary, which means that the text is complete.
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

    The ids that end an answer are not part of its text, and are not passed to matchers.
    """

    def __init__(self, inner: LLMatcher, ends: EndingIds) -> None:
        self.inner = inner
        self.ends = ends

    def __repr__(self) -> str:
        return f"Matcher(complete={self.is_complete} problem={self.problem!r})"

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequest, and change nothing, where the ids do not fit."""
        if token_ids and not self.inner.consume_tokens(list(token_ids)):
            raise InvalidRequest(f"sampling.constraint: {self.problem}")

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of the ids, from the first on, may follow one another. Changes nothing."""
        fitting: int = self.inner.validate_tokens(list(token_ids))
        return fitting

    def num_drafts_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many drafts can be verified.

        This is `num_fitting` without a draft that ends the answer by itself.
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
        """Return whether the text is complete, nothing may follow, and no id ends it."""
        return not self.ends.token_ids and self.is_complete

    @property
    def is_complete(self) -> bool:
        return bool(self.inner.is_stopped() and not self.inner.is_error())

    @property
    def problem(self) -> str:
        """Return why nothing may follow although the text is not complete."""
        return sentence_of(self.inner.get_error()) or _OTHERWISE

    def copy(self) -> "Matcher":
        return Matcher(self.inner.deep_copy(), self.ends)


def sentence_of(message: str) -> str:
    """Return llguidance's message on one line.

    This leaves out its state, the grammar, and its own options, which no client can set.
    """
    if "coerce_one_of" in message:
        return _ONE_OF
    for extra in ("<state>", "<non-verbose/>", "\n   1 | "):
        message = message.partition(extra)[0]
    return " ".join(message.split())


_WORD_BITS = 32
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """A step requests these masks for one sequence; `drafts` follow one another in its constraint."""

    matcher: Matcher
    drafts: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)


@dataclass(frozen=True, slots=True)
class Masks:
    """Bit i % 32 of words[row, i // 32] is set if id i may follow."""

    words: NDArray[np.int32]  # The shape is [rows, vocab_size // 32 + 1].
    vocab_size: int

    def __len__(self) -> int:
        return len(self.words)

    def allows(self, row: int, token_id: int) -> bool:
        return bool(self.words[row, token_id // _WORD_BITS] >> (token_id % _WORD_BITS) & 1)

    def expanded(self) -> NDArray[np.bool]:
        octets = self.words.view(np.uint8)
        return np.unpackbits(octets, axis=1, count=self.vocab_size, bitorder="little").view(np.bool)


@dataclass(frozen=True, slots=True)
class MaskCounts:
    rows: int = 0
    seconds: float = 0.0


class MaskMaker:
    """A maker creates masks for the logits of one model.

    One thread at a time calls it; it has other threads that help.
    """

    def __init__(self, vocab_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._vocab_size = vocab_size
        self._clock = clock
        self._threads: LLExecutor | None = None
        self._counts = MaskCounts()

    @property
    def counts(self) -> MaskCounts:
        return self._counts

    @property
    def _executor(self) -> LLExecutor:
        if self._threads is None:  # Most models never get a request for masks.
            self._threads = LLExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
        return self._threads

    def make(self, requests: Sequence[MaskRequest]) -> Masks:
        began = self._clock()
        num_rows = sum(each.num_rows for each in requests)
        masks = Masks(np.zeros((num_rows, self._vocab_size // _WORD_BITS + 1), np.int32), self._vocab_size)
        self._fill_plain(requests, masks.words)
        first = 0
        for each in requests:
            own = masks.words[first : first + each.num_rows]
            if each.drafts:
                self._fill_drafted(each, own)
            elif each.matcher.inner.is_error():
                own[:] = 0
            each.matcher.ends.allow_where_whole(own, self._vocab_size)
            first += each.num_rows
        counts = self._counts
        self._counts = MaskCounts(counts.rows + num_rows, counts.seconds + self._clock() - began)
        return masks

    def _fill_plain(self, requests: Sequence[MaskRequest], words: NDArray[np.int32]) -> None:
        matchers, first = [], 0
        for each in requests:
            if not each.drafts:
                matchers.append((each.matcher.inner, first))
            first += each.num_rows
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, *_memory(words))

    def _fill_drafted(self, request: MaskRequest, words: NDArray[np.int32]) -> None:
        copy, drafts = request.matcher.inner.deep_copy(), list(request.drafts)
        self._executor.unsafe_compute_mask_ptr_with_draft_token([(copy, 0, drafts)], *_memory(words))
        if not copy.is_error():
            return
        # One of the rows is a dead end, after which no matcher works: it gets no bits, and the others are
        # computed one by one.
        for row in range(len(words)):
            words[row] = 0
            copy = request.matcher.inner.deep_copy()
            if copy.consume_tokens(drafts[:row]):
                self._executor.unsafe_compute_mask_ptr([(copy, 0)], *_memory(words[row : row + 1]))
            if copy.is_error():
                words[row] = 0


def _memory(words: NDArray[np.int32]) -> tuple[int, int, int]:
    return words.ctypes.data, words.shape[1] * words.itemsize, len(words)
