"""Which of many ranks may hold a block, all of them in one look-up. Pure.

A rank is a column, a bit of every slot; a block lies in the slot of its lowest bits. A rank that was said to
hold a block always seems to hold it. One that was not seems to where another of its blocks lies in the same
slot, or did since its column was last filled: whoever asks looks into the rank's set before believing it.
"""

from array import array
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

_WORD_BITS = 64
_MIN_SLOTS = 1 << 16
_SLOTS_PER_BLOCK = 8  # of the fullest rank: about one block in nine then seems held and is not
_MAX_BYTES_PER_BLOCK = 4
_MAX_DEPTH = np.iinfo(np.uint8).max
_BITS = tuple(np.uint64(1 << bit) for bit in range(_WORD_BITS))


class HolderFilter:
    """`_words[number][slot]`: a bit each of 64 columns."""

    def __init__(self) -> None:
        self._words: list[NDArray[np.uint64]] = []
        self._num_slots = _MIN_SLOTS  # a power of two
        self._free: list[int] = []

    def __repr__(self) -> str:
        return f"HolderFilter(words={len(self._words)}, slots={self._num_slots})"

    @property
    def num_columns(self) -> int:
        """Those that can be in use; each is below that."""
        return len(self._words) * _WORD_BITS

    @property
    def size_bytes(self) -> int:
        return sum(word.nbytes for word in self._words)

    def take_column(self) -> int:
        """An empty one."""
        if not self._free:
            first = self.num_columns
            self._words.append(np.zeros(self._num_slots, "<u8"))
            self._free = list(reversed(range(first, self.num_columns)))
        return self._free.pop()

    def give_column(self, column: int) -> None:
        """Nobody's any more."""
        self._clear(column)
        self._free.append(column)

    def fill(self, column: int, blocks: Collection[int], total_blocks: int) -> None:
        """The rank holds exactly these. `total_blocks`: of all ranks, by which the size is bounded."""
        self._grow(len(blocks), total_blocks)
        self._clear(column)
        self.add(column, blocks)

    def add(self, column: int, blocks: Collection[int]) -> None:
        """Fastest where they are packed."""
        if blocks:
            slots = self._slots(blocks if isinstance(blocks, array) else array("Q", blocks))
            self._words[column // _WORD_BITS][slots] |= _BITS[column % _WORD_BITS]

    def holders(self, block: int, most: int) -> list[int] | None:
        """The columns of the ranks that seem to hold it; None: they are more than `most`."""
        slot = block & (self._num_slots - 1)
        words = [int(word[slot]) for word in self._words]
        if sum(map(int.bit_count, words)) > most:
            return None
        found = []
        for number, word in enumerate(words):
            while word:
                lowest = word & -word
                found.append(number * _WORD_BITS + lowest.bit_length() - 1)
                word ^= lowest
        return found

    def depths(self, hashes: Sequence[int]) -> list[int]:
        """Per column, how many leading blocks of 1 to 255 the rank seems to hold: never less than it does."""
        assert 0 < len(hashes) <= _MAX_DEPTH
        slots = self._slots(array("Q", hashes))
        depths: list[int] = []
        for word in self._words:
            holders = np.bitwise_and.accumulate(word.take(slots))
            octets = holders[: np.count_nonzero(holders)].view(np.uint8).reshape(-1, 8)
            held = np.unpackbits(octets, axis=1, bitorder="little")  # [block, column of the word]
            depths += held.sum(axis=0, dtype=np.uint8).tolist()
        return depths

    def _slots(self, packed: "array[int]") -> NDArray[np.int64]:
        return np.frombuffer(packed, np.int64) & (self._num_slots - 1)

    def _clear(self, column: int) -> None:
        self._words[column // _WORD_BITS] &= ~_BITS[column % _WORD_BITS]

    def _grow(self, blocks: int, total_blocks: int) -> None:
        wanted, most_bytes = blocks * _SLOTS_PER_BLOCK, total_blocks * _MAX_BYTES_PER_BLOCK
        while self._num_slots < wanted and 2 * self.size_bytes <= most_bytes:
            # Every block seems held in both of its new slots, until its column is filled anew.
            self._words = [np.tile(word, 2) for word in self._words]
            self._num_slots *= 2
