"""These functions wait for what another task says."""

import asyncio


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when one is set, or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def pass_on(source: asyncio.Event, target: asyncio.Event) -> None:
    """Set the one once the other is."""
    await source.wait()
    target.set()
