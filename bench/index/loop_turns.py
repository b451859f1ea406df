"""This module measures how long an event loop does not look at sockets and timers."""

import selectors
import time
from selectors import SelectorKey


class TimedSelector(selectors.DefaultSelector):
    """The selector of an event loop. Whoever comes while a turn lasts waits for its end.

    In CPU time of the loop's thread, so that other work on the machine counts only through the caches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn_began_s: float | None = None
        self.longest_turn_s = 0.0

    def begin(self) -> None:
        """Turns before this one do not count, nor what has been of it."""
        self.longest_turn_s, self._turn_began_s = 0.0, time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if self._turn_began_s is not None:
            self.longest_turn_s = max(self.longest_turn_s, time.thread_time() - self._turn_began_s)
        ready = super().select(timeout)
        self._turn_began_s = time.thread_time()
        return ready
