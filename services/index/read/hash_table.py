"""This pure module maps block hashes to small numbers in packed arrays, and looks many up at once.

A hash is in a row of its bucket, which its lowest bits select. If the bucket has no free row, the hash is in
a dict, beside the buckets. Buckets are split in two in small steps, so that no change has to wait until all
are split:

    buckets  | split | not yet split | the other halves of those split |
             0     split           half                           half + split

A row takes 13 bytes: the hash, its number, and a tag, the hash's highest byte, by which a single hash is
searched. So a hash takes 20 to 38 bytes.
"""

import numpy as np
from numpy.typing import NDArray

_ROW_BITS = 4
_ROWS = 1 << _ROW_BITS  # A bucket's keys fill two cache lines.
_MIN_BUCKETS = 64
_TAG_SHIFT = 56
# Splitting begins at the first, and is complete at the second number of hashes per row of the first half.
_LEAST_LOAD, _MOST_LOAD = 0.6, 0.7

PackedHashes = NDArray[np.uint64]
Numbers = NDArray[np.uint32]  # 0 means none.
Rows = NDArray[np.int64]


class HashTable:
    def __init__(self) -> None:
        self._half, self._split = _MIN_BUCKETS, 0
        self._keys = np.zeros((_MIN_BUCKETS, _ROWS), np.uint64)
        self._keys[0] = 1  # A free row's key is a hash of another bucket: 1 in bucket 0, elsewhere 0.
        self._numbers = np.zeros((_MIN_BUCKETS, _ROWS), np.uint32)  # A free row has number 0.
        self._tags = bytearray(_MIN_BUCKETS * _ROWS)  # A free row may keep the tag of an earlier hash.
        self._is_over = np.zeros(_MIN_BUCKETS, np.bool_)  # Some hashes of these buckets are in `_over`.
        self._over: dict[int, dict[int, int]] = {}  # The keys are buckets.
        self._in_rows = 0
        self._view()

    def __len__(self) -> int:
        return self._in_rows + sum(map(len, self._over.values()))

    def __repr__(self) -> str:
        return f"HashTable({len(self)} in {self.num_buckets} buckets, {len(self) - self._in_rows} beside)"

    @property
    def num_buckets(self) -> int:
        return self._half + self._split

    @property
    def size_bytes(self) -> int:
        return self._keys.nbytes + self._numbers.nbytes + self._is_over.nbytes + len(self._tags)

    def make_room(self, count: int) -> None:
        """Make room for `count` more hashes. Rows that were found before become invalid."""
        while True:
            load = (self._in_rows + count) / (self._half * _ROWS)
            due = int(self._half * min(1.0, (load - _LEAST_LOAD) / (_MOST_LOAD - _LEAST_LOAD)))
            if due <= self._split:
                return
            self._split_until(due)

    def number(self, block: int) -> int:
        bucket = block & (2 * self._half - 1)
        if bucket >= self._half + self._split:
            bucket -= self._half
        row, tag = bucket << _ROW_BITS, block >> _TAG_SHIFT
        end = row + _ROWS
        while (row := self._tags.find(tag, row, end)) >= 0:
            if self._key_view[row] == block:
                return self._number_view[row]
            row += 1
        return self._over[bucket].get(block, 0) if bucket in self._over else 0

    def find(self, hashes: PackedHashes) -> Numbers:
        return self.locate(hashes)[1]

    def locate(self, hashes: PackedHashes) -> tuple[Rows, Numbers]:
        """Return the hashes' rows, for `put`, and numbers; a row is -1 and a number 0 for an absent hash."""
        buckets = self._buckets(hashes)
        found = np.flatnonzero(self._keys.take(buckets, 0) == hashes[:, None])
        which = found >> _ROW_BITS
        in_rows = (buckets.take(which) << _ROW_BITS) + (found & (_ROWS - 1))
        rows, numbers = np.full(len(hashes), -1), np.zeros(len(hashes), np.uint32)
        rows[which], numbers[which] = in_rows, self._numbers.reshape(-1).take(in_rows)
        if self._over:
            for i in np.flatnonzero(self._is_over.take(buckets) & (rows < 0)).tolist():
                numbers[i] = self._over[int(buckets[i])].get(int(hashes[i]), 0)
        return rows, numbers

    def put(self, hashes: PackedHashes, rows: Rows, numbers: Numbers) -> None:
        """Set the numbers of distinct hashes; 0 removes one. `rows` are those of a `locate` just before."""
        is_in_row = rows >= 0
        self._put_in_rows(rows[is_in_row], numbers[is_in_row])
        is_new = ~is_in_row
        hashes, numbers = hashes[is_new], numbers[is_new]
        if self._over:
            self._take_from_beside(hashes)
        is_some = numbers > 0
        self._insert(hashes[is_some], numbers[is_some])

    def renumber(self, start: int, stop: int, new_of: Numbers) -> None:
        """Replace each number n in these buckets, and beside them, by new_of[n]."""
        old = self._numbers[start:stop].reshape(-1)
        new = new_of.take(old)
        rows = np.flatnonzero(new != old)
        self._put_in_rows(rows + (start << _ROW_BITS), new[rows])
        for bucket in (start + np.flatnonzero(self._is_over[start:stop])).tolist():
            renumbered = ((block, int(new_of[number])) for block, number in self._over[bucket].items())
            self._over[bucket] = {block: number for block, number in renumbered if number}
            self._drop_if_empty(bucket)

    def mark_numbers(self, start: int, stop: int, in_use: NDArray[np.bool_]) -> None:
        in_use[self._numbers[start:stop]] = True
        for bucket in (start + np.flatnonzero(self._is_over[start:stop])).tolist():
            in_use[list(self._over[bucket].values())] = True

    def _buckets(self, hashes: PackedHashes) -> Rows:
        if not self._split:
            return (hashes & (self._half - 1)).view(np.int64)
        buckets = (hashes & (2 * self._half - 1)).view(np.int64)
        buckets -= (buckets >= self.num_buckets) * self._half
        return buckets

    def _put_in_rows(self, rows: Rows, numbers: Numbers) -> None:
        self._numbers.reshape(-1)[rows] = numbers
        freed = rows[numbers == 0]
        self._keys.reshape(-1)[freed] = freed < _ROWS
        self._in_rows -= len(freed)

    def _insert(self, hashes: PackedHashes, numbers: Numbers) -> None:
        keys, in_rows = self._keys.reshape(-1), self._numbers.reshape(-1)
        while len(hashes):
            buckets = self._buckets(hashes)
            rows = (self._numbers.take(buckets, 0) == 0).argmax(1)
            rows += buckets << _ROW_BITS
            is_free = in_rows.take(rows) == 0
            if not is_free.all():
                for i in np.flatnonzero(~is_free).tolist():
                    self._put_beside(int(buckets[i]), int(hashes[i]), int(numbers[i]))
                hashes, numbers, rows = hashes[is_free], numbers[is_free], rows[is_free]
            keys[rows] = hashes
            self._tag_view[rows] = hashes >> _TAG_SHIFT
            is_in = keys.take(rows) == hashes  # If several hashes chose the same row, one gets it.
            in_rows[rows[is_in]] = numbers[is_in]
            self._in_rows += int(np.count_nonzero(is_in))
            hashes, numbers = hashes[~is_in], numbers[~is_in]

    def _split_until(self, end: int) -> None:
        """Split the buckets up to `end`; when all are split, the whole table becomes the first half."""
        first, half, count = self._split, self._half, end - self._split
        size = self.num_buckets
        # No other view of these arrays exists. realloc extends large ones in place, or remaps their pages.
        self._keys.resize((size + count, _ROWS), refcheck=False)
        self._numbers.resize((size + count, _ROWS), refcheck=False)
        self._is_over.resize(size + count, refcheck=False)
        del self._tag_view  # The bytearray cannot grow while a view exists.
        self._tags += bytes(count << _ROW_BITS)
        self._view()
        keys, numbers = self._keys[first:end], self._numbers[first:end]
        moves = (keys & half) != 0
        tags = self._tag_view.reshape(-1, _ROWS)
        np.copyto(tags[size:], tags[first:end])  # Both halves get the tag, as the hash is in one of them.
        for both, of_split in ((self._keys, keys), (self._numbers, numbers)):
            np.copyto(both[size:], of_split, where=moves)
            np.copyto(of_split, 0, where=moves)
        if first == 0:
            keys[0][moves[0]] = 1
        beside: dict[int, int] = {}
        for bucket in (first + np.flatnonzero(self._is_over[first:end])).tolist():
            beside |= self._over.pop(bucket)
        self._is_over[first:end] = False
        self._split = end
        if end == half:
            self._half, self._split = 2 * half, 0
        if beside:
            self._insert(
                np.fromiter(beside.keys(), np.uint64, len(beside)),
                np.fromiter(beside.values(), np.uint32, len(beside)),
            )

    def _view(self) -> None:
        # Memoryviews read a single row faster than numpy.
        self._key_view = self._keys.reshape(-1).data
        self._number_view = self._numbers.reshape(-1).data
        self._tag_view = np.frombuffer(self._tags, np.uint8)

    # -- beside the buckets -----------------------------------------------------------------------

    def _put_beside(self, bucket: int, block: int, number: int) -> None:
        self._over.setdefault(bucket, {})[block] = number
        self._is_over[bucket] = True

    def _take_from_beside(self, hashes: PackedHashes) -> None:
        buckets = self._buckets(hashes)
        for i in np.flatnonzero(self._is_over.take(buckets)).tolist():
            if (of_bucket := self._over.get(bucket := int(buckets[i]))) is not None:
                of_bucket.pop(int(hashes[i]), None)
                self._drop_if_empty(bucket)

    def _drop_if_empty(self, bucket: int) -> None:
        if not self._over[bucket]:
            del self._over[bucket]
            self._is_over[bucket] = False
