"""Silence on a stream is counted in ticks of our own: who stood still has not listened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TICK_S = 0.5


class SilenceLimit:
    """A stream has one limit. Whoever reads it reports what was `heard`."""

    def __init__(self) -> None:
        self._ticks = 0

    def heard(self) -> None:
        self._ticks = 0

    @asynccontextmanager
    async def bounded(self, limit_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError in whoever reads once nothing was heard for so long."""
        limit = asyncio.timeout(None)
        watch = asyncio.create_task(self._count(limit, limit_s))
        try:
            async with limit:
                yield
        finally:
            watch.cancel()

    async def _count(self, limit: asyncio.Timeout, limit_s: float) -> None:
        self._ticks = 0
        while self._ticks * _TICK_S < limit_s:
            await asyncio.sleep(_TICK_S)
            self._ticks += 1
        limit.reschedule(asyncio.get_running_loop().time())
