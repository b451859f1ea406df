"""This module has what the tests against a real etcd share."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from services.etcd.connection import EtcdSettings, Observe, unobserved
from services.etcd.etcd_client import Etcd

# Short elections: a restart takes a fraction of a second, and a lease may be as short as 1 s.
FAST = ("--heartbeat-interval=20", "--election-timeout=200", "--unsafe-no-fsync")


def client(*endpoints: str, seed: int = 1, observe: Observe = unobserved, **settings: Any) -> Etcd:
    return Etcd(EtcdSettings(endpoints, **settings), rng=random.Random(seed), observe=observe)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"line {condition.__code__.co_firstlineno}: not within {timeout_s} s") from None


@asynccontextmanager
async def running(
    *loops: Any, ends_with: tuple[type[BaseException], ...] = ()
) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run coroutines in the background, and cancel them at the end.

    They never end by themselves: raises what one ended with, unless the test expects that.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, *ends_with):
                await task
