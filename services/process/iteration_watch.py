"""This watch detects that a thread is in one iteration for too long: in a kernel, a transport call or a lock
that never returns.

    thread:  rests --begins--> an iteration --begins--> the next one --rests--> rests
    loop:    looks, and looks again: for how many looks is it the same iteration?

It counts looks, not seconds: after a process was stopped, an iteration seems to have taken minutes, but the
loop did not look in that time.
"""

import asyncio
import sys
import threading
import traceback

LOOKS = 20  # An iteration hangs after this many looks, which are spread over its limit.
_STALLED_LOOKS = LOOKS // 4


class IterationWatch:
    """The thread calls `begins` and `rests`, the loop `look`; each writes only its own fields."""

    def __init__(self) -> None:
        self.looks = 0  # This many looks in a row saw the same iteration.
        self._iteration = 0
        self._resting = True
        self._seen = 0

    @property
    def stalled(self) -> bool:
        """Return whether it has been in one iteration for a quarter of its limit, which may have good
        reasons.
        """
        return self.looks >= _STALLED_LOOKS

    def begins(self) -> None:
        self._iteration += 1
        self._resting = False

    def rests(self) -> None:
        self._resting = True

    def look(self) -> None:
        iteration = self._iteration
        self.looks = self.looks + 1 if iteration == self._seen and not self._resting else 0
        self._seen = iteration


async def until_it_hangs(watch: IterationWatch, limit_s: float) -> None:
    while watch.looks < LOOKS:
        await asyncio.sleep(limit_s / LOOKS)
        watch.look()


async def until_it_goes_on(watch: IterationWatch, limit_s: float) -> None:
    while watch.looks:
        await asyncio.sleep(limit_s / LOOKS)
        watch.look()


def stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
