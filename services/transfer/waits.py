"""Timeouts are measured so that a process that was stopped does not take what came in time for late.

    the loop looks every tenth of a second --> all is read up to now
         |--stopped since it last looked: what came meanwhile lies in sockets--> all is read up to then,
                                                                       until it has looked ten times more

If the process, or its loop, was stopped, every deadline seems to be over when it wakes, and the messages that
came in time are not read yet. So Hearing tells up to which time all messages were read, and a deadline is
over only by that time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from services.values.errors import IsthmusError, root_cause

T = TypeVar("T")

_LOOK_S = 0.1
_STALL_S = 1.0
_LOOKS = 10  # After a stall gRPC needs so many to read its sockets, and the loop to pass the messages on.


class Hearing:
    """`look` is called on the loop only; any thread may read `heard_s`."""

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
        # A stall while it is behind does not restart the count, or a loop that always stalls is never late.
        self._behind = self._behind - 1 if self._behind else _LOOKS if stalled else 0
        if not self._behind:
            self.heard_s = now_s

    async def listen(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()


async def within(limit_s: float, awaited: Coroutine[Any, Any, T]) -> T:
    """Return the result of `awaited`.

    Time is counted in looks, and a stall counts as one look only, so that what came meanwhile is found.

    Raises:
        TimeoutError: it took longer than `limit_s`, and was cancelled.
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


A = TypeVar("A")
B = TypeVar("B")


async def both(
    first: Coroutine[Any, Any, A],
    second: Coroutine[Any, Any, B],
    beside: Coroutine[Any, Any, None] | None = None,
    *,
    patience_s: float = 0.0,
) -> tuple[A, B]:
    """Run two coroutines and return both results; `beside` runs until they are done.

    The error of the first one to fail is raised after everything else was cancelled and awaited. If `second`
    fails, `first` has `patience_s` to fail too, and then its error is raised instead.
    """
    try:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(first)
            legs = call, group.create_task(_outspoken(second, call, patience_s))
            extra = group.create_task(beside) if beside is not None else None
            results = await _result(legs[0]), await _result(legs[1])
            if extra is not None:
                extra.cancel()
    except BaseExceptionGroup as failures:
        raise root_cause(failures) from failures
    return results


async def _outspoken(leg: Coroutine[Any, Any, B], other: asyncio.Task[A], patience_s: float) -> B:
    try:
        return await leg
    except IsthmusError:
        # A stall counts as one look only, so that the answer that came meanwhile is found.
        for _ in range(_LOOKS):
            await asyncio.wait([other], timeout=patience_s / _LOOKS)
            if other.done():
                break
        raise


async def _result(task: Awaitable[A]) -> A:
    return await task
