"""Coalescing lets tokens wait a moment, so that several of a request go to its client in one message.

A message costs the router the same with one token as with ten. While it has time to spare none waits; while
its loop's thread is short of time, tokens wait as long as it takes to have some again, and never longer than
--coalesce-ms. What a client waits for most, the first token and the end, never does; nor does a token whose
request has them further apart than that, for no other would come to go with it. Where they have to wait the
longest it is the router that is late, and not the tokens: then all do.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_SAMPLE_S = 0.2
_LEAST_S = 0.002
_SHORT_OF_TIME, _TIME_TO_SPARE = 0.8, 0.6
_GROWS, _SHRINKS = 1.5, 0.8


class Window:
    """Tokens wait for the seconds of a window, which opens while the thread is busier than is good. Pure."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.now_s = 0.0

    @property
    def is_widest(self) -> bool:
        return self.now_s >= self._most_s

    def heed(self, busy: float) -> None:
        """Open or close with `busy`, the share of the time since the last call in which the thread ran or
        wanted to."""
        if busy > _SHORT_OF_TIME:
            self.now_s = min(self._most_s, max(_LEAST_S, _GROWS * self.now_s))
        elif busy < _TIME_TO_SPARE:
            self.now_s *= _SHRINKS
            if self.now_s < _LEAST_S:
                self.now_s = 0.0


def busy_s() -> float:
    """Return the seconds that this thread has run, or wanted to while others did (proc(5): schedstat)."""
    with suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    return time.thread_time()


class Waiting(Protocol):
    def release(self) -> None:
        """Tell your reader what has come."""


class Coalescing:
    """A loop has one. Tokens of all streams that wait are released together."""

    def __init__(
        self,
        most_s: float,
        clock: Callable[[], float] = time.monotonic,
        busy_s: Callable[[], float] = busy_s,
    ) -> None:
        self.clock = clock
        self._window = Window(most_s)
        self._busy_s = busy_s
        self._sampled = clock(), busy_s()
        self._held: list[Waiting] = []

    @property
    def window_s(self) -> float:
        """Return the seconds that tokens wait now at most."""
        return self._window.now_s

    def hold(self, waiting: Waiting, now_s: float, since_s: float) -> bool:
        """Return whether it is to wait, whose last token came at `since_s`. It is then released in a
        moment, once for each time that it was held."""
        self._sample(now_s)
        if now_s - since_s >= self._window.now_s and not self._window.is_widest:
            return False
        if not self._held:
            asyncio.get_running_loop().call_later(self._window.now_s, self._release)
        self._held.append(waiting)
        return True

    def _sample(self, now_s: float) -> None:
        since, busy_before = self._sampled
        if now_s - since >= _SAMPLE_S:
            busy = self._busy_s()
            self._window.heed((busy - busy_before) / (now_s - since))
            self._sampled = now_s, busy

    def _release(self) -> None:
        held, self._held = self._held, []
        for waiting in held:
            waiting.release()
