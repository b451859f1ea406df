"""This watch sees whether a thread is in one iteration for too long: a kernel, a transport call or a lock
that never comes back.

    thread:  rests --begins--> a turn --begins--> the next one --rests--> rests
    loop:    looks, and looks again: for how many looks is it the same turn?

It counts looks, not seconds: a process that was stopped finds an iteration that seems to have taken minutes,
but whoever looks stood still with it.
"""

import asyncio
import sys
import threading
import traceback

LOOKS = 20  # It looks so often at an iteration until its limit is over.
_STALLED_LOOKS = LOOKS // 4


class TurnWatch:
    """The thread calls `begins` and `rests`, the loop `look`; each writes what is its own only."""

    def __init__(self) -> None:
        self.looks = 0  # So many looks in a row saw the same iteration.
        self._turn = 0
        self._resting = True
        self._seen = 0

    @property
    def stalled(self) -> bool:
        """Say whether it has been in one iteration for a quarter of its limit: it
        may hang, or have its reasons.
        """
        return self.looks >= _STALLED_LOOKS

    def begins(self) -> None:
        """Begin an iteration: what the thread did before is done."""
        self._turn += 1
        self._resting = False

    def rests(self) -> None:
        self._resting = True

    def look(self) -> None:
        turn = self._turn
        self.looks = self.looks + 1 if turn == self._seen and not self._resting else 0
        self._seen = turn


async def until_it_hangs(watch: TurnWatch, limit_s: float) -> None:
    """Return when the thread has been in one iteration for `limit_s`."""
    while watch.looks < LOOKS:
        await asyncio.sleep(limit_s / LOOKS)
        watch.look()


def stack_of(thread: threading.Thread) -> str:
    """Return where the thread is, as far as Python knows; "" where it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
