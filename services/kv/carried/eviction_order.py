"""A heap that is put right where it is looked at tells who is worth least, of many whose worth changes."""

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Valued(Protocol):
    @property
    def worth(self) -> float: ...


T = TypeVar("T", bound=Valued)

_STALE = 64  # So many entries out of date are not worth a tidying.


class EvictionOrder(Generic[T]):
    """The first that was added goes first of equals. A worth may rise unsaid; `sink` must be called where it
    falls.

    Each has one entry in force, with the worth it had then: no more than it has now.
    """

    def __init__(self) -> None:
        self._in_force: dict[T, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, T]] = []  # It has those in force, and others.
        self._serials = count()

    def add(self, item: T) -> None:
        self._push(item, next(self._serials))

    def sink(self, item: T) -> None:
        """Note that it may be worth less than before."""
        worth, serial = self._in_force[item]
        if item.worth < worth:
            self._push(item, serial)

    def remove(self, item: T) -> None:
        del self._in_force[item]
        if len(self._heap) > 2 * len(self._in_force) + _STALE:
            self._heap = [(*entry, item) for item, entry in self._in_force.items()]
            heapify(self._heap)

    def least(self) -> T | None:
        while self._heap:
            worth, serial, item = self._heap[0]
            in_force = self._in_force.get(item) == (worth, serial)
            if in_force and item.worth == worth:
                return item
            heappop(self._heap)
            if in_force:
                self._push(item, serial)
        return None

    def check(self) -> None:
        """Raises AssertionError where somebody is not found in time."""
        entries = set(self._heap)
        for item, (worth, serial) in self._in_force.items():
            assert worth <= item.worth, f"{item} is worth {item.worth} and stands at {worth}"
            assert (worth, serial, item) in entries, f"{item} has no entry"

    def _push(self, item: T, serial: int) -> None:
        self._in_force[item] = (item.worth, serial)
        heappush(self._heap, (item.worth, serial, item))
