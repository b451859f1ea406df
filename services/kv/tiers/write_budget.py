"""A write budget limits what a rank writes to files: disks wear out, and others may share them.

It allows so many bytes a second, and saves up those of one second. A write may begin while no bytes are owed,
whatever its size. So a block that is larger than a second's bytes is written, too, and the next one waits
for what that took. Pure: the caller tells the time.
"""

import math

_SAVES_S = 1.0


class WriteBudget:
    def __init__(self, bytes_per_s: float = math.inf, now_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = bytes_per_s * _SAVES_S
        self._at_s = now_s

    def __repr__(self) -> str:
        return f"WriteBudget({self._left:.0f} bytes left, {self._bytes_per_s:.0f} a second)"

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a write may begin; 0 where one may begin now."""
        if self._bytes_per_s == math.inf:
            return 0.0
        earned = (now_s - self._at_s) * self._bytes_per_s
        self._left, self._at_s = min(self._left + earned, self._bytes_per_s * _SAVES_S), now_s
        return max(0.0, -self._left / self._bytes_per_s)

    def spend(self, num_bytes: int) -> None:
        self._left -= num_bytes
