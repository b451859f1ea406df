"""This module waits for two things at once, where either may fail."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from services.values.errors import IsthmusError, root_cause

A = TypeVar("A")
B = TypeVar("B")

_LOOKS = 10


async def both(
    first: Coroutine[Any, Any, A],
    second: Coroutine[Any, Any, B],
    beside: Coroutine[Any, Any, None] | None = None,
    *,
    patience_s: float = 0.0,
) -> tuple[A, B]:
    """Run two legs and return both results; `beside` runs until they are done.

    It raises what the first leg to fail raised; everything else is cancelled and awaited before. Where the
    second one fails, the first has `patience_s` to fail too, and then it is that which is raised.
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
        # Only one counts in a stall, so that the answer that came meanwhile is found.
        for _ in range(_LOOKS):
            await asyncio.wait([other], timeout=patience_s / _LOOKS)
            if other.done():
                break
        raise


async def _result(task: Awaitable[A]) -> A:
    return await task
