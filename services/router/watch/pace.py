"""All watchers of a router may take a share of its time: its requests go first."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """Telling of a thousand requests, or of hundreds of ranks, takes tens of milliseconds, each time and
    for each watcher. After every turn there is none for as long as makes it the share that they have."""

    def __init__(self, share: float = 0.1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._free_s = 0.0

    @property
    def left_s(self) -> float:
        """Return the seconds until the next turn; at 0 and less it may be taken now."""
        return self._free_s - self._clock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        began_s = self._clock()
        try:
            yield
        finally:
            self._free_s = began_s + (self._clock() - began_s) / self._share
