"""Hearing tells up to when all has been heard that was said to this process.

    the loop looks every tenth of a second --> heard up to now
         |--stood still since it last looked: what came meanwhile lies in sockets--> heard up to then,
                                                                         until it has looked ten times more

What came in time counts before what is late fails. When the process was stopped, or its loop, every deadline
seems to be over on waking, and the words that kept it are not read yet.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_S = 0.1
_STALL_S = 1.0
_LOOKS = 10  # After a stall gRPC needs them to read its sockets, and the loop to pass on what was in them.


class Hearing:
    """`look` belongs to the loop; any thread may read `heard_s`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = self.heard_s = clock()
        self._behind = 0

    def __repr__(self) -> str:
        return f"Hearing({self._looked_s - self.heard_s:.1f} s behind)"

    def look(self) -> None:
        now_s = self._clock()
        stalled = now_s - self._looked_s > _STALL_S
        self._looked_s = now_s
        # A stall while it is behind does not start anew: a loop that always stalls would never be late.
        self._behind = self._behind - 1 if self._behind else _LOOKS if stalled else 0
        if not self._behind:
            self.heard_s = now_s

    async def listen(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()


async def within(limit_s: float, awaited: Coroutine[Any, Any, T]) -> T:
    """Return what it returns. Raises TimeoutError, and cancels it, where that takes longer than `limit_s`.

    Time is counted in looks: only one counts in a stall, so that what came meanwhile is found.
    """
    task = asyncio.ensure_future(awaited)
    try:
        for _ in range(_LOOKS):
            await asyncio.wait([task], timeout=limit_s / _LOOKS)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
