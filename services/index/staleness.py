"""How far an index is behind what it mirrors, without comparing clocks of two hosts. Pure.

an event happens -- age: on the rank's clock --> its delta is written -- delay: on the router's --> seen
"""

from collections import deque


class Staleness:
    """The oldest age told within the last `window_s`. Times are seconds on one monotonic clock."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._ages: deque[tuple[float, float]] = deque()  # (told at, age), ages falling

    def told(self, age_s: float, now: float) -> None:
        """A delta or snapshot came whose oldest event had waited so long when it was written."""
        while self._ages and self._ages[-1][1] <= age_s:
            self._ages.pop()
        self._ages.append((now, age_s))

    def age_s(self, now: float) -> float:
        """0 when nothing was told lately: then nothing has changed, or the way here is cut, which the
        delay shows."""
        while self._ages and self._ages[0][0] < now - self._window_s:
            self._ages.popleft()
        return self._ages[0][1] if self._ages else 0.0
