"""The last things that happened, for one who may be slow to take them. Pure."""

from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Ring(Generic[_T]):
    """At most `capacity`; the oldest give way, and are counted."""

    def __init__(self, capacity: int) -> None:
        self._kept: deque[_T] = deque(maxlen=capacity)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, item: _T) -> bool:
        """Whether there was room."""
        is_full = len(self._kept) == self._kept.maxlen
        self.dropped += is_full
        self._kept.append(item)
        return not is_full

    def take(self) -> list[_T]:
        """All that are kept, the oldest first; they are kept no more."""
        taken = list(self._kept)
        self._kept.clear()
        return taken
