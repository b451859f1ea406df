"""Waiting for what another task says."""

import asyncio


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Returns when one is set, or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def pass_on(source: asyncio.Event, target: asyncio.Event) -> None:
    """Sets the one once the other is."""
    await source.wait()
    target.set()
