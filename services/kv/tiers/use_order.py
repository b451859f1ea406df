"""Blocks are looked through here in order of use, in a tier that blocks of any age come to."""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, Protocol, TypeVar

MOST_LOOKED_AT = 256
# A use costs nothing here. So after many uses a look puts blocks back where they belong: at most so many.
_MOST_PUT_BACK = 1024
_DEPTH_BITS, _NUMBER_BITS = 32, 48


class Used(Protocol):
    """Neither value changes, except that `used` grows."""

    used: int
    depth: int


T = TypeVar("T", bound=Used)


class UseOrder(Generic[T]):
    """The least recently used block comes first, and of blocks that were used together the deepest."""

    def __init__(self) -> None:
        self._count = count()
        self._numbers: dict[T, int] = {}
        self._blocks: dict[int, T] = {}
        # Each block is here once, where its use has it or has had it, and some that have left. `used`, depth
        # and number are in one int, as half a million tuples would keep the garbage collector busy.
        self._heap: list[int] = []
        self.is_behind = False  # The last call had too many to put back.

    def __repr__(self) -> str:
        return f"UseOrder({len(self._blocks)} blocks)"

    def __contains__(self, block: T) -> bool:
        return block in self._numbers

    def add(self, block: T) -> None:
        number = self._numbers[block] = next(self._count)
        self._blocks[number] = block
        heappush(self._heap, _packed(block, number))

    def remove(self, block: T) -> None:
        del self._blocks[self._numbers.pop(block)]
        if len(self._heap) > 2 * len(self._blocks) + MOST_LOOKED_AT:
            self.rebuild()

    def rebuild(self) -> None:
        """Put all blocks where they belong."""
        self._heap = [_packed(block, number) for number, block in self._blocks.items()]
        heapify(self._heap)

    def first(self, may_go: Callable[[T], bool], most_used: float = math.inf) -> T | None:
        """Return the first block that may go; None if none of the first few may, or of those whose `used` is
        at most `most_used`.

        It is None as well where many blocks were used since: then it `is_behind`, and the next call goes on.
        """
        aside, left, found = list[int](), _MOST_PUT_BACK, None
        while self._heap and left and len(aside) < MOST_LOOKED_AT:
            entry = self._heap[0]
            number = entry & (1 << _NUMBER_BITS) - 1
            block = self._blocks.get(number)
            if block is None:
                heappop(self._heap)
            elif (now := _packed(block, number)) != entry:
                heapreplace(self._heap, now)
                left -= 1
            elif block.used > most_used:
                break
            elif may_go(block):
                found = block
                break
            else:
                aside.append(heappop(self._heap))
        for entry in aside:
            heappush(self._heap, entry)
        self.is_behind = left == 0
        return found


def _packed(block: Used, number: int) -> int:
    shallowness = (1 << _DEPTH_BITS) - 1 - block.depth
    return (block.used << _DEPTH_BITS | shallowness) << _NUMBER_BITS | number
