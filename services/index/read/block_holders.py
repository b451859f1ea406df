"""This pure module knows which ranks hold which blocks.

A rank is a column: a bit in a mask that represents a set of ranks. A block has the number of its set; blocks
share sets, because those of one conversation have the same few holders. A column that is given up is dead:
its bit counts no more, and is swept out of the table in small steps, one with each change. Sets that no block
has are forgotten in the same way.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.index.read.hash_table import HashTable, Numbers, PackedHashes
from services.index.records import hashes_of

_SWEPT_BUCKETS = 4096  # Each step sweeps this many buckets.
# Each step handles this many sets, or four times as many as the last change made, if that is more: otherwise
# sets could be made faster than they are forgotten.
_SETS_AT_ONCE = 1024
_MOST_DEAD_COLUMNS = 64  # A sweep is due when dead columns exceed those alive by this many.
_FEW_COLUMNS = 8
_BITS_OF = tuple(tuple(bit for bit in range(8) if octet >> bit & 1) for octet in range(256))
_MIN_SETS = 4096  # With fewer sets, unused ones are not searched for.
_DONE = object()
_AT_ONCE = 128  # This many blocks of a prompt are looked up if its holders change often.

Columns = NDArray[np.int64]
Run = tuple[int, int]  # It has a number of blocks of a prompt, and the mask of their holders.


def packed(hashes: Iterable[int]) -> PackedHashes:
    return np.frombuffer(hashes if isinstance(hashes, array) else hashes_of(hashes), np.uint64)


def columns_of(mask: int) -> list[int]:
    if mask.bit_count() <= _FEW_COLUMNS:
        columns = []
        while mask:
            lowest = mask & -mask
            columns.append(lowest.bit_length() - 1)
            mask ^= lowest
        return columns
    octets = enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little"))
    return [8 * number + bit for number, octet in octets if octet for bit in _BITS_OF[octet]]


class _Sets:
    """Each mask has a number here; number 0 is the empty set."""

    def __init__(self) -> None:
        self.masks = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []
        self._many = _MIN_SETS
        # It has a flag for each number, between `begin_looking` and `end_looking`.
        self._in_use: bytearray | None = None
        self.num_new = 0  # This many are new since the last step of tidying.

    @property
    def num_at_once(self) -> int:
        return max(_SETS_AT_ONCE, 4 * self.num_new)

    @property
    def are_many(self) -> bool:
        return len(self._numbers) > self._many

    def number(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            self.num_new += 1
            if self._free:
                number = self._free.pop()
                self.masks[number] = mask
            else:
                number = len(self.masks)
                self.masks.append(mask)
                if self._in_use is not None:
                    self._in_use.append(0)
            self._numbers[mask] = number
        if self._in_use is not None:
            self._in_use[number] = 1
        return number

    def begin_looking(self) -> None:
        """Count every set whose number is requested from now on as in use."""
        self._in_use = bytearray(len(self.masks))
        self._in_use[0] = 1

    def in_use(self) -> NDArray[np.bool_]:
        """Return a view of the flags by number, for marking. Release it before a number is requested, which
        may grow them.
        """
        assert self._in_use is not None
        return np.frombuffer(self._in_use, np.bool_)

    def forget(self, numbers: Iterable[int]) -> None:
        assert self._in_use is not None
        for number in numbers:
            if not self._in_use[number] and self._numbers.get(self.masks[number]) == number:
                del self._numbers[self.masks[number]]
                self.masks[number] = 0
                self._free.append(number)

    def end_looking(self) -> None:
        self._in_use = None
        self._many = 2 * len(self._numbers) + _MIN_SETS


class BlockHolders:
    def __init__(self) -> None:
        self._table = HashTable()
        self._sets = _Sets()
        self._num_blocks = np.zeros(0, np.int64)  # It is indexed by column.
        # It has for each column the number of the set of that column alone.
        self._alone = np.zeros(0, np.uint32)
        self._free: list[int] = []
        self._shown = 0  # This is the mask of the columns that count.
        self._dead = self._num_dead_blocks = 0
        self._tidying: Iterator[None] | None = None  # It continues with each change.

    def __repr__(self) -> str:
        return f"BlockHolders({self._table}, {len(self._sets.masks)} sets)"

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes

    # -- columns ----------------------------------------------------------------------------------

    def take_column(self) -> int:
        """Return a column that holds nothing, and does not count before `show`."""
        self._tidy()  # The column may never see a change, which would tidy.
        if not self._free:
            first, count = len(self._alone), max(64, len(self._alone))
            self._free = list(range(first + count - 1, first - 1, -1))
            self._num_blocks.resize(first + count, refcheck=False)
            self._alone.resize(first + count, refcheck=False)
        column = self._free.pop()
        self._alone[column] = self._sets.number(1 << column)
        return column

    def show(self, column: int) -> None:
        self._shown |= 1 << column

    def give_column(self, column: int) -> None:
        self._shown &= ~(1 << column)
        self._dead |= 1 << column
        self._num_dead_blocks += self.num_blocks(column)
        self._num_blocks[column] = 0

    def num_blocks(self, column: int) -> int:
        return int(self._num_blocks[column])

    # -- what they hold ---------------------------------------------------------------------------

    def change(self, hashes: PackedHashes, columns: Columns, is_added: NDArray[np.bool_]) -> None:
        self._table.make_room(len(hashes))
        ordered = np.sort(hashes)
        if (ordered[1:] == ordered[:-1]).any():
            self._change_several_times(hashes, columns, is_added)
        else:
            rows, old = self._table.locate(hashes)
            self._table.put(hashes, rows, self._changed(old, columns, is_added))
        self._tidy()

    def _change_several_times(
        self, hashes: PackedHashes, columns: Columns, is_added: NDArray[np.bool_]
    ) -> None:
        order = hashes.argsort(kind="stable")
        ordered = hashes[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(starts, append=len(hashes))
        blocks = ordered[starts]
        rows, old = self._table.locate(blocks)
        new = old.copy()
        once = counts == 1
        changes = order[starts[once]]
        new[once] = self._changed(old[once], columns[changes], is_added[changes])
        for i in np.flatnonzero(~once).tolist():
            mask = self._sets.masks[old[i]] & ~self._dead
            for change in order[starts[i] : starts[i] + counts[i]].tolist():
                bit, before = 1 << int(columns[change]), mask
                mask = mask | bit if is_added[change] else mask & ~bit
                self._num_blocks[columns[change]] += (mask > before) - (mask < before)
            new[i] = self._sets.number(mask)
        self._table.put(blocks, rows, new)

    def _changed(self, old: Numbers, columns: Columns, is_added: NDArray[np.bool_]) -> Numbers:
        alone = self._alone.take(columns)
        new = alone * is_added
        is_changed = new != old
        is_shared = (old != 0) & (old != alone)
        if is_shared.any():
            # Most blocks of a delta have the same holders.
            steps = old[is_shared].astype(np.int64) << 32 | columns[is_shared] << 1 | is_added[is_shared]
            each, which = np.unique(steps, return_inverse=True)
            after = [self._step(step >> 32, step >> 1 & 0x7FFFFFFF, step & 1) for step in each.tolist()]
            new[is_shared] = np.array([number for number, _ in after], np.uint32)[which]
            is_changed[is_shared] = np.array([changed for _, changed in after])[which]
        np.add.at(self._num_blocks, columns[is_changed], 2 * is_added[is_changed].astype(np.int64) - 1)
        return new

    def _step(self, number: int, column: int, is_added: int) -> tuple[int, bool]:
        before = self._sets.masks[number] & ~self._dead
        after = before | 1 << column if is_added else before & ~(1 << column)
        return self._sets.number(after), after != before

    def runs(self, hashes: Sequence[int]) -> list[Run]:
        """Return ascending (depth, mask): the ranks in the mask hold this many leading blocks; some of them
        hold no more.
        """
        return self._runs_of(self._changes_along(hashes), len(hashes))

    def layers(self, hashes: Sequence[int]) -> tuple[list[Run], list[Run]]:
        """Return `runs`, and ascending (depth, mask): from there on the blocks are in all of these columns,
        shown or not. Where a column that is not shown changes twice between equal sets, that is not seen.
        """
        changes, masks = list(self._changes_along(hashes)), self._sets.masks
        return self._runs_of(changes, len(hashes)), [(depth, masks[number]) for depth, number in changes]

    def _runs_of(self, changes: Iterable[tuple[int, int]], length: int) -> list[Run]:
        runs: list[Run] = []
        holding, last, masks = self._shown, -1, self._sets.masks
        for depth, number in changes:
            if number != last:
                last, before = number, holding
                holding &= masks[number]
                if depth and holding != before:
                    runs.append((depth, before))
                if not holding:
                    return runs
        runs.append((length, holding))
        return runs

    def _changes_along(self, hashes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Yield positions and set numbers, with every change of the set among them.

        A rank that holds a block holds all blocks before it, so between two blocks with equal sets all sets
        are equal.
        """
        number, last = self._table.number, len(hashes) - 1
        if not (first := number(hashes[0])):
            return [(0, 0)]
        at: Sequence[int] = (0, last // 4, last // 2, last - last // 4, last)
        numbers = [first, *(number(hashes[i]) for i in at[1:])]
        if len(set(numbers)) == len(at):  # There may be many more changes.
            if last < _AT_ONCE:
                return enumerate(self._table.find(packed(hashes)).tolist())
            at = [last * part // _AT_ONCE for part in range(_AT_ONCE + 1)]
            numbers = self._table.find(packed([hashes[i] for i in at])).tolist()
        changes = [(0, numbers[0])]
        start, before = 0, first
        for end, after in zip(at, numbers, strict=True):
            while before != after:
                low, start, before = start, end, after
                while start - low > 1:
                    middle = (low + start) >> 1
                    if (of_middle := number(hashes[middle])) == changes[-1][1]:
                        low = middle
                    else:
                        start, before = middle, of_middle
                changes.append((start, before))
            start = end
        return changes

    # -- tidying up -------------------------------------------------------------------------------

    def _tidy(self) -> None:
        if self._tidying is None:
            if self._sets.are_many:  # Otherwise successive sweeps would make more and more sets.
                self._tidying = self._forget_sets()
            elif self._dead and self._is_sweep_due():
                self._tidying = self._sweep_columns()
        elif next(self._tidying, _DONE) is _DONE:
            self._tidying = None
        self._sets.num_new = 0

    def _is_sweep_due(self) -> bool:
        dead, alive = self._dead.bit_count(), len(self._alone) - len(self._free) - self._dead.bit_count()
        return 2 * self._num_dead_blocks > len(self._table) or dead > alive + _MOST_DEAD_COLUMNS

    def _sweep_columns(self) -> Iterator[None]:
        """Remove the columns that are dead now from all sets.

        Sets that are made after the beginning lack these columns, and no set is forgotten in the meantime.
        """
        columns, self._num_dead_blocks = self._dead, 0
        masks, new_of = self._sets.masks, np.arange(len(self._sets.masks), dtype=np.uint32)
        first = 0
        while first < len(new_of):
            start, first = first, min(first + self._sets.num_at_once, len(new_of))
            for number in range(start, first):
                if (mask := masks[number]) & columns:
                    new_of[number] = self._sets.number(mask & ~columns)
            yield
        for start, stop in self._buckets():
            newer = np.arange(len(new_of), len(masks), dtype=np.uint32)
            new_of = np.concatenate((new_of, newer)) if len(newer) else new_of
            self._table.renumber(start, stop, new_of)
            yield
        self._dead &= ~columns
        self._free += columns_of(columns)

    def _forget_sets(self) -> Iterator[None]:
        """Forget the sets that no block has, unless a block gets one in the meantime."""
        self._sets.begin_looking()
        for start, stop in self._buckets():
            self._table.mark_numbers(start, stop, self._sets.in_use())
            yield
        self._sets.in_use()[self._alone] = True
        unused = np.flatnonzero(~self._sets.in_use())
        first = 0
        while first < len(unused):
            start, first = first, first + self._sets.num_at_once
            self._sets.forget(unused[start:first].tolist())
            yield
        self._sets.end_looking()

    def _buckets(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of buckets from the first on. Buckets that are split meanwhile have their other halves
        at the end, so none is missed.
        """
        start = 0
        while start < self._table.num_buckets:
            stop = min(start + _SWEPT_BUCKETS, self._table.num_buckets)
            yield start, stop
            start = stop
