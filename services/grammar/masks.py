"""Masks say as bits which tokens may come next: there is one row for each token that a step chooses.

    matcher, no drafts        row 0: after the sequence
    matcher, drafts d1 d2     row 0: after the sequence   row 1: after d1   row 2: after d1 d2

The ids that end an answer are allowed where its text is whole, and nowhere else. A row without any bit: the
text is not whole, and no token goes on with it.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from services.grammar.matcher import Matcher

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
    """Bit i % 32 of words[row, i // 32] says whether id i may come."""

    words: NDArray[np.int32]  # [rows, vocab_size // 32 + 1]
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
    """A maker makes masks for the logits of one model.

    One thread at a time calls; the maker has others that help.
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
        if self._threads is None:  # most models never get a request for masks
            self._threads = LLExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
        return self._threads

    def make(self, asked: Sequence[MaskRequest]) -> Masks:
        began = self._clock()
        num_rows = sum(each.num_rows for each in asked)
        masks = Masks(np.zeros((num_rows, self._vocab_size // _WORD_BITS + 1), np.int32), self._vocab_size)
        self._fill_plain(asked, masks.words)
        first = 0
        for each in asked:
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

    def _fill_plain(self, asked: Sequence[MaskRequest], words: NDArray[np.int32]) -> None:
        matchers, first = [], 0
        for each in asked:
            if not each.drafts:
                matchers.append((each.matcher.inner, first))
            first += each.num_rows
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, *_memory(words))

    def _fill_drafted(self, asked: MaskRequest, words: NDArray[np.int32]) -> None:
        copy, drafts = asked.matcher.inner.deep_copy(), list(asked.drafts)
        self._executor.unsafe_compute_mask_ptr_with_draft_token([(copy, 0, drafts)], *_memory(words))
        if not copy.is_error():
            return
        # One of the rows is a dead end, from which no matcher comes back: it gets no bits, the others get
        # theirs.
        for row in range(len(words)):
            words[row] = 0
            copy = asked.matcher.inner.deep_copy()
            if copy.consume_tokens(drafts[:row]):
                self._executor.unsafe_compute_mask_ptr([(copy, 0)], *_memory(words[row : row + 1]))
            if copy.is_error():
                words[row] = 0


def _memory(words: NDArray[np.int32]) -> tuple[int, int, int]:
    return words.ctypes.data, words.shape[1] * words.itemsize, len(words)
