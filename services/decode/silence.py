"""A timer for who waits often and mostly briefly: set once, not at each wait."""

import asyncio
from collections.abc import Callable


class Silence:
    """`ring` is called when somebody has waited for `limit_s`, and again after each more of them."""

    def __init__(self, limit_s: float, ring: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the wait began; None: nobody waits
        self._timer = self._loop.call_later(limit_s, self._look)

    def begins(self) -> None:
        self._since = self._loop.time()

    def ends(self) -> None:
        self._since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._limit_s
        if self._since is not None:
            left_s += self._since - self._loop.time()
            if left_s <= 0:
                self._ring()
                left_s = self._limit_s
        self._timer = self._loop.call_later(left_s, self._look)
