"""The units of one carried group, pages of a window or slots of states, have any number of holders each."""

from collections.abc import Sequence

from services.kv.page_allocator import PageAllocator
from services.values.errors import ProtocolError
from services.values.kv import PageId


class UnitPool:
    """A unit is free while nobody holds it. A sequence and checkpoints hold the same page of a tail."""

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
        """Return units that nobody held, held once now.

        Raises:
            NoCapacity: fewer are free; nothing is taken.
        """
        units = self._allocator.allocate(num_units)
        for unit in units:
            self._holders[unit] = 1
        return units

    def share(self, units: Sequence[PageId]) -> None:
        """Hold each once more. Raises ProtocolError for one that is free."""
        for unit in units:
            if not self._holders[unit]:
                raise ProtocolError(f"unit {unit} is free and cannot be shared")
            self._holders[unit] += 1

    def drop(self, units: Sequence[PageId]) -> None:
        """Hold each once less; what nobody holds any more is free. Raises ProtocolError for a free one."""
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
