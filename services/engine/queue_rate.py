"""A queue gets shorter at a rate. This is pure: the clock is the caller's.

    someone waits --> taken, taken, came back, ... --> nobody waits: forgotten

What is measured is the time in which somebody waits all along, for only then is it the queue that limits how
many come in.
"""

from collections import deque

_SAMPLES = 64
_ENOUGH = 4  # Fewer say nothing.


class QueueRate:
    def __init__(self) -> None:
        self._since_s: float | None = None  # The measured time began here; None: nobody waits.
        self._taken_s: deque[float] = deque()
        self._came_back = 0  # No other has come in for these yet.

    def waits(self, now_s: float) -> None:
        """Note that somebody waits, perhaps behind others."""
        if self._since_s is None:
            self._since_s = now_s

    def taken(self, now_s: float) -> None:
        """Note that one came in; where nobody was known to wait, that says nothing."""
        if self._came_back:
            self._came_back -= 1
            return
        if self._since_s is None:
            return
        self._taken_s.append(now_s)
        if len(self._taken_s) > _SAMPLES:
            self._since_s = self._taken_s.popleft()

    def came_back(self) -> None:
        """Note that one that had come in waits again: the next that comes in leaves the queue as long as
        before."""
        self._came_back += 1

    def empty(self) -> None:
        """Note that nobody waits any more."""
        self._since_s = None
        self._taken_s.clear()
        self._came_back = 0

    def per_s(self, now_s: float) -> float:
        """Return how many come in per second; 0: not known. It falls while nobody comes in."""
        if self._since_s is None or len(self._taken_s) < _ENOUGH:
            return 0.0
        return len(self._taken_s) / max(now_s - self._since_s, 1e-3)
