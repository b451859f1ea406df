"""Which ranks hold which blocks. Pure.

A rank is a column, a bit in the mask of a set of ranks. A block has the number of its set; blocks share sets,
for those of one conversation have the same few holders. A column that is given up is dead: its bits count no
more, and are swept out of the table bit by bit, with each change some.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.index.read.hash_table import HashTable, Numbers, PackedHashes
from services.index.records import hashes_of

_SWEPT_BUCKETS = 4096  # with each change
_MOST_DEAD_COLUMNS = 64  # and as many as are alive: then they are swept
_FEW_COLUMNS = 8
_BITS_OF = tuple(tuple(bit for bit in range(8) if octet >> bit & 1) for octet in range(256))
_MIN_SETS = 4096  # below, none are looked for that no block has
_AT_ONCE = 128  # blocks of a prompt, where its holders change often

Columns = NDArray[np.int64]
Run = tuple[int, int]  # so many blocks of a prompt, and who holds them, as a mask


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
    """Masks by their numbers; 0 is nobody's."""

    def __init__(self) -> None:
        self.masks = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []
        self._many = _MIN_SETS

    @property
    def are_many(self) -> bool:
        """It is time to look which of them no block has any more."""
        return len(self._numbers) > self._many

    def number(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.masks[number] = mask
            else:
                number = len(self.masks)
                self.masks.append(mask)
            self._numbers[mask] = number
        return number

    def keep(self, is_used: NDArray[np.bool_]) -> None:
        """These, by number, and no others."""
        for number in np.flatnonzero(~is_used).tolist():
            if self._numbers.get(self.masks[number]) == number:
                del self._numbers[self.masks[number]]
                self.masks[number] = 0
                self._free.append(number)
        self._many = 2 * len(self._numbers) + _MIN_SETS


class BlockHolders:
    def __init__(self) -> None:
        self._table = HashTable()
        self._sets = _Sets()
        self._num_blocks = np.zeros(0, np.int64)  # by column
        self._alone = np.zeros(0, np.uint32)  # by column: the number of its own set
        self._free: list[int] = []
        self._shown = 0  # columns that count
        self._dead = self._num_dead_blocks = 0
        self._sweep: _Sweep | None = None

    def __repr__(self) -> str:
        return f"BlockHolders({self._table}, {len(self._sets.masks)} sets)"

    @property
    def size_bytes(self) -> int:
        """Of the table."""
        return self._table.size_bytes

    # -- columns ----------------------------------------------------------------------------------

    def take_column(self) -> int:
        """One that holds nothing, and does not count before it is shown."""
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
        """It holds nothing any more."""
        self._shown &= ~(1 << column)
        self._dead |= 1 << column
        self._num_dead_blocks += self.num_blocks(column)
        self._num_blocks[column] = 0

    def num_blocks(self, column: int) -> int:
        return int(self._num_blocks[column])

    # -- what they hold ---------------------------------------------------------------------------

    def change(self, hashes: PackedHashes, columns: Columns, is_added: NDArray[np.bool_]) -> None:
        """One after the other."""
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
        """The numbers of blocks that were each changed once."""
        alone = self._alone.take(columns)
        new = alone * is_added
        is_changed = new != old
        is_shared = (old != 0) & (old != alone)
        if is_shared.any():
            # Most blocks of a delta had the same holders.
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
        """Ascending: so many leading blocks are held by these ranks, some of whom hold none behind them."""
        runs: list[Run] = []
        holding, last, masks = self._shown, -1, self._sets.masks
        for depth, number in self._changes_along(hashes):
            if number != last:
                last, before = number, holding
                holding &= masks[number]
                if depth and holding != before:
                    runs.append((depth, before))
                if not holding:
                    return runs
        runs.append((len(hashes), holding))
        return runs

    def _changes_along(self, hashes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Blocks and the numbers of their holders, every change among them.

        Whoever holds a block holds those before it: between two that the same hold nobody else does.
        """
        number, last = self._table.number, len(hashes) - 1
        if not (first := number(hashes[0])):
            return [(0, 0)]
        at: Sequence[int] = (0, last // 4, last // 2, last - last // 4, last)
        numbers = [first, *(number(hashes[i]) for i in at[1:])]
        if len(set(numbers)) == len(at):  # there may be many more
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
        if self._sweep is not None:
            self._go_on_sweeping(self._sweep)
        elif self._dead and self._is_sweep_due():
            self._sweep, self._num_dead_blocks = _Sweep(self._sets, self._dead), 0
        elif self._sets.are_many:
            self._forget_sets()

    def _is_sweep_due(self) -> bool:
        dead, alive = self._dead.bit_count(), len(self._alone) - len(self._free) - self._dead.bit_count()
        return 2 * self._num_dead_blocks > len(self._table) or dead > alive + _MOST_DEAD_COLUMNS

    def _go_on_sweeping(self, sweep: "_Sweep") -> None:
        start, stop = sweep.bucket, min(sweep.bucket + _SWEPT_BUCKETS, self._table.num_buckets)
        self._table.renumber(start, stop, sweep.new_of(len(self._sets.masks)))
        sweep.bucket = stop
        if stop == self._table.num_buckets:
            self._sweep = None
            self._dead &= ~sweep.columns
            self._free += columns_of(sweep.columns)
            if self._sets.are_many:
                self._forget_sets()

    def _forget_sets(self) -> None:
        is_used = self._table.numbers_in_use(len(self._sets.masks))
        is_used[self._alone] = is_used[0] = True
        self._sets.keep(is_used)


class _Sweep:
    """Through all buckets, from the first on: the halves of those split stand behind them.

    Sets that are new since it began have none of its columns.
    """

    def __init__(self, sets: _Sets, columns: int) -> None:
        self.columns = columns
        self.bucket = 0
        masks = tuple(sets.masks)
        new_of = (sets.number(mask & ~columns) if mask & columns else i for i, mask in enumerate(masks))
        self._new_of = np.fromiter(new_of, np.uint32, len(masks))

    def new_of(self, count: int) -> Numbers:
        """By number, for so many."""
        if len(self._new_of) < count:
            newer = np.arange(len(self._new_of), count, dtype=np.uint32)
            self._new_of = np.concatenate((self._new_of, newer))
        return self._new_of
