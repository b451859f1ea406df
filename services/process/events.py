"""These functions wait for events of other tasks."""

import asyncio


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def pass_on(source: asyncio.Event, target: asyncio.Event) -> None:
    await source.wait()
    target.set()
