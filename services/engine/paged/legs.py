"""Waiting for two things at once, where either may fail."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from services.errors import root_cause

A = TypeVar("A")
B = TypeVar("B")


async def both(
    first: Coroutine[Any, Any, A],
    second: Coroutine[Any, Any, B],
    beside: Coroutine[Any, Any, None] | None = None,
) -> tuple[A, B]:
    """Run two legs and return both results; `beside` runs until they are done.

    Raises what the first leg to fail raised; everything else is cancelled and awaited before.
    """
    try:
        async with asyncio.TaskGroup() as group:
            legs = group.create_task(first), group.create_task(second)
            extra = group.create_task(beside) if beside is not None else None
            results = await _result(legs[0]), await _result(legs[1])
            if extra is not None:
                extra.cancel()
    except BaseExceptionGroup as failures:
        raise root_cause(failures) from failures
    return results


async def _result(task: Awaitable[A]) -> A:
    return await task
