"""The free pages of a pool are kept as runs of neighbours, so that a transfer consists of few pieces.

UnitPool counts holders: a unit of a group beside full attention, which is a page of a window or the slot of
a state, may have any number of them.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from services.kv.transfer_plan import runs_of
from services.values.errors import NoCapacity, ProtocolError
from services.values.kv import PageId, PageRun


class PageAllocator:
    """This allocator hands out the pages [0, num_pages).

    Invariants: no two free runs touch (neighbours are merged when freed), and `_starts`, `_ends` and
    `_by_length` list the same runs. A call costs O(runs touched * log runs), plus a short memmove.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._free_pages = 0
        self._is_free = bytearray(num_pages)
        self._starts: list[int] = []
        self._ends: list[int] = []  # _ends[i] is the end of the run that begins at _starts[i].
        self._by_length: list[tuple[int, int]] = []  # These are (length, start), in ascending order.
        self._give(0, num_pages)

    def __repr__(self) -> str:
        return f"PageAllocator(free={self._free_pages}/{self.num_pages} runs={len(self._starts)})"

    @property
    def free_pages(self) -> int:
        return self._free_pages

    @property
    def num_free_runs(self) -> int:
        return len(self._starts)

    def allocate(self, num_pages: int) -> list[PageId]:
        """Return pages from the shortest free run that holds them all, or else from the longest runs.

        Raises:
            NoCapacity: fewer pages are free; nothing is allocated.
        """
        if num_pages < 0:
            raise ProtocolError(f"cannot allocate {num_pages} pages")
        if num_pages > self._free_pages:
            raise NoCapacity(f"{num_pages} pages wanted, {self._free_pages} are free")
        pages: list[PageId] = []
        while len(pages) < num_pages:
            start, end = self._take(num_pages - len(pages))
            pages.extend(map(PageId, range(start, end)))
        return pages

    def free(self, pages: Sequence[PageId]) -> None:
        """Take back pages, given in any order.

        Raises:
            ProtocolError: a page is free already, named twice or not of this pool; nothing is freed.
        """
        ordered = sorted(pages)
        previous = None
        for page in ordered:
            if not 0 <= page < self.num_pages:
                raise ProtocolError(f"page {page} is not one of this pool's {self.num_pages}")
            if self._is_free[page] or page == previous:
                raise ProtocolError(f"page {page} is freed twice")
            previous = page
        for run in runs_of(ordered):
            self._give(run.first_page, run.end)

    def free_runs(self) -> Iterator[PageRun]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield PageRun(start, end - start)

    def _take(self, num_pages: int) -> tuple[int, int]:
        fitting = bisect_left(self._by_length, (num_pages, -1))
        length, start = self._by_length.pop(min(fitting, len(self._by_length) - 1))
        end = start + min(length, num_pages)
        index = bisect_left(self._starts, start)
        if end == start + length:
            del self._starts[index], self._ends[index]
        else:
            self._starts[index] = end
            insort(self._by_length, (start + length - end, end))
        self._mark(start, end, free=False)
        return start, end

    def _give(self, start: int, end: int) -> None:
        self._mark(start, end, free=True)
        index = bisect_right(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._forget(index)[1]
        if index > 0 and self._ends[index - 1] == start:
            index -= 1
            start = self._forget(index)[0]
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        insort(self._by_length, (end - start, start))

    def _forget(self, index: int) -> tuple[int, int]:
        start, end = self._starts.pop(index), self._ends.pop(index)
        del self._by_length[bisect_left(self._by_length, (end - start, start))]
        return start, end

    def _mark(self, start: int, end: int, *, free: bool) -> None:
        self._is_free[start:end] = (b"\x01" if free else b"\x00") * (end - start)
        self._free_pages += end - start if free else start - end


class UnitPool:
    """A unit has any number of holders, such as a sequence and checkpoints; one without any is free."""

    def __init__(self, num_units: int) -> None:
        self._allocator = PageAllocator(num_units)
        self._holders = [0] * num_units

    def __repr__(self) -> str:
        return f"UnitPool(free={self.free_units}/{self.num_units})"

    @property
    def num_units(self) -> int:
        return self._allocator.num_pages

    @property
    def free_units(self) -> int:
        return self._allocator.free_pages

    def take(self, num_units: int) -> list[PageId]:
        """Allocate units, each with one holder.

        Raises:
            NoCapacity: fewer units are free; nothing is allocated.
        """
        units = self._allocator.allocate(num_units)
        for unit in units:
            self._holders[unit] = 1
        return units

    def share(self, units: Sequence[PageId]) -> None:
        """Add one holder to each unit. It raises ProtocolError if a unit is free."""
        for unit in units:
            if not self._holders[unit]:
                raise ProtocolError(f"unit {unit} is free and cannot be shared")
            self._holders[unit] += 1

    def drop(self, units: Sequence[PageId]) -> None:
        """Remove one holder of each unit, and free those left without.

        Raises:
            ProtocolError: a unit has no holder.
        """
        last = []
        for unit in units:
            if not self._holders[unit]:
                raise ProtocolError(f"unit {unit} is dropped more often than held")
            self._holders[unit] -= 1
            if not self._holders[unit]:
                last.append(unit)
        if last:
            self._allocator.free(last)

    def holders_of(self, unit: int) -> int:
        return self._holders[unit]
