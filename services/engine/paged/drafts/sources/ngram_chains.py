"""Hash chains tell where a text's last three ids stood before, as in zlib's deflate (RFC 1951, section 4).

    heads[hash of three ids]  ->  latest position behind such three  ->  the one before it  ->  ...

Others may have the same hash, so whoever walks a chain compares.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from services.engine.paged.drafts.sources.source import Continuation, Ids, Trail, common_len, first_longest

NGRAM = 3
NO_ID = -1  # It parts texts.
_FEW = 64  # From so many positions on numpy is faster.

# These are odd and below 2**32, so that a product with an id stays within 63 bits.
_FIRST, _SECOND, _THIRD, _SHIFT = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 13


class NgramChains:
    """Positions are counted from 0. Each that is remembered costs 8 bytes, and so does a head."""

    def __init__(self, num_heads: int, num_kept: int | None = None) -> None:
        """Both are powers of two. The last `num_kept` positions are remembered; with None all are."""
        self._head_mask = num_heads - 1
        self._heads = array("q", (0,)) * num_heads  # It has 1 + position, and 0 for none.
        self._earlier = array("q", (0,)) * (num_kept or 0)  # It has the same by position.
        self._num_kept = num_kept
        self._last = [NO_ID] * NGRAM
        self.end = 0  # It is the next position.

    @property
    def size_bytes(self) -> int:
        return 8 * (len(self._heads) + len(self._earlier))

    def double(self) -> None:
        """Have twice as many heads and positions; none was forgotten so far.

        It costs a copy: of the two heads that one becomes, either begins with its chain.
        """
        assert self._num_kept is not None and self.end <= self._num_kept
        self._heads += self._heads
        self._head_mask = len(self._heads) - 1
        self._earlier += array("q", (0,)) * self._num_kept
        self._num_kept *= 2

    def add(self, ids: Sequence[int]) -> None:
        """Append ids to what was added before. With `num_kept` they are no more than that, and do not cross a
        multiple of it."""
        text = [*self._last, *ids]
        earlier = self._chain_many(text) if len(ids) > _FEW else self._chain_few(text)
        if self._num_kept is None:
            self._earlier += earlier
        else:
            first = self.end & self._num_kept - 1
            self._earlier[first : first + len(ids)] = earlier
        self._last = text[-NGRAM:]
        self.end += len(ids)

    def walk(self, a: int, b: int, c: int) -> Iterator[int]:
        position = self._heads[_slot(a, b, c) & self._head_mask] - 1
        oldest, mask = 0, -1
        if self._num_kept is not None:
            oldest, mask = max(0, self.end - self._num_kept), self._num_kept - 1
        while position >= oldest:
            yield position
            position = self._earlier[position & mask] - 1

    def _chain_few(self, text: list[int]) -> "array[int]":
        earlier = array("q")
        heads, mask, position = self._heads, self._head_mask, self.end
        for a, b, c in zip(text, text[1:], text[2:-1], strict=False):
            slot = _slot(a, b, c) & mask
            position += 1
            earlier.append(heads[slot])
            heads[slot] = position
        return earlier

    def _chain_many(self, text: list[int]) -> "array[int]":
        """Chain as `_chain_few` does: positions of one slot stand together once sorted, in their order."""
        ids = np.array(text, dtype=np.int64)
        slots = _slots(ids) & self._head_mask
        order = np.argsort(slots.astype(np.int32), kind="stable")
        slots, positions = slots[order], order + (self.end + 1)
        is_first = np.concatenate(([True], slots[1:] != slots[:-1]))
        heads = np.frombuffer(self._heads, dtype=np.int64)
        earlier = np.empty(len(order), dtype=np.int64)
        earlier[order] = np.where(is_first, heads[slots], np.concatenate(([0], positions[:-1])))
        is_last = np.concatenate((is_first[1:], [True]))
        heads[slots[is_last]] = positions[is_last]
        return array("q", earlier.tobytes())


def _slot(a: int, b: int, c: int) -> int:
    return (a * _FIRST ^ b * _SECOND ^ c * _THIRD) >> _SHIFT


def _slots(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    mixed = ids[:-3] * _FIRST ^ ids[1:-2] * _SECOND ^ ids[2:-1] * _THIRD
    return mixed >> _SHIFT


# Where a file is copied with changes, 4 give 4.3 tokens a step, 16 give 4.6, and 64 give 4.7.
_MOST_COMPARED = 16
_MIN_HEADS, _MAX_HEADS = 1 << 10, 1 << 16


class OwnNgrams:
    """It has one sequence, whose ids only ever grow, and are read in place. It implements Source."""

    name = "lookup"

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._chains = NgramChains(min(_MAX_HEADS, max(_MIN_HEADS, 1 << len(ids).bit_length())))
        self._trail = Trail()

    @property
    def backlog(self) -> int:
        return len(self._ids) - self._chains.end

    def index(self, most: int) -> int:
        first, count = self._chains.end, min(most, self.backlog)
        if count > 0:
            self._chains.add(self._ids[first : first + count])
        return count

    def match(self, most: int) -> Continuation | None:
        end = len(self._ids)
        if end <= NGRAM:
            return None
        length, position = first_longest(self._places(end))
        if length < NGRAM:
            return None
        self._trail = Trail(end, position)
        return Continuation(self._repeated(position, end, most), length)

    def _places(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield (ids in common, position behind them), first where the last match would go on."""
        ids, position = self._ids, self._trail.position_at(end)
        yield common_len(ids, end, ids, position), position
        for position in islice(self._chains.walk(ids[-3], ids[-2], ids[-1]), _MOST_COMPARED):
            yield common_len(ids, end, ids, position), position

    def _repeated(self, first: int, end: int, most: int) -> Ids:
        """Return ids[first:end] over and over: what stands there twice in a row may go on to."""
        ids = self._ids[first : min(end, first + most)]
        return ids if len(ids) == most else (ids * (most // len(ids) + 1))[:most]
