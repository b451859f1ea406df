"""This makes one stream of several, each item as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _End:
    """One stream has ended, and with what."""

    error: Exception | None = None


async def merged(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Yield each item with its source's place among them, and close them all.

    A reader that is behind holds them up: each has at most one item that was not taken. The first error of
    any is raised, behind what came before it.
    """
    items = asyncio.Queue[tuple[int, _T | _End]](maxsize=1)
    pumps = [asyncio.create_task(_pump(place, source, items)) for place, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            place, item = await items.get()
            if not isinstance(item, _End):
                yield place, item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    place: int, source: AsyncGenerator[_T, None], items: "asyncio.Queue[tuple[int, _T | _End]]"
) -> None:
    end = _End()
    try:
        async with aclosing(source):
            async for item in source:
                await items.put((place, item))
    except Exception as error:
        end = _End(error)
    await items.put((place, end))
