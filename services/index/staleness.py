"""An index is so far behind what it mirrors, without comparing clocks of two hosts. All is pure.

an event happens -- age: on the rank's clock --> its delta is written -- delay: on the router's --> seen
"""

from collections import deque


class Staleness:
    """This keeps the oldest age reported within the last `window_s`. Times are seconds on one monotonic
    clock."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._ages: deque[tuple[float, float]] = deque()  # It holds (reported at, age), ages falling.

    def told(self, age_s: float, now: float) -> None:
        """Note that a delta or snapshot came whose oldest event had waited so long when it was written."""
        while self._ages and self._ages[-1][1] <= age_s:
            self._ages.pop()
        self._ages.append((now, age_s))

    def age_s(self, now: float) -> float:
        """Return the oldest age; 0 when nothing was reported lately.

        Then nothing has changed, or the way here is cut, which the delay shows.
        """
        while self._ages and self._ages[0][0] < now - self._window_s:
            self._ages.popleft()
        return self._ages[0][1] if self._ages else 0.0
