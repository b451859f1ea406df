"""Keeps the garbage collector off the index.

Looking through millions of hashes takes it 50 to 200 ms, in which no request is served. None of them is ever
garbage by a cycle.
"""

import asyncio
import contextlib
import gc

from services.index.read.mirror import Mirror

_INTERVAL_S = 0.05
_FREEZE_BLOCKS = 200_000  # looking through so many takes about 10 ms


async def freeze(mirror: Mirror) -> None:
    """What has been read, some of it at a time; returns when all has."""
    frozen = 0
    while not mirror.ready.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTERVAL_S):
                await mirror.ready.wait()
        if mirror.blocks.added_blocks - frozen >= _FREEZE_BLOCKS:
            frozen = mirror.blocks.added_blocks
            gc.freeze()
    gc.freeze()
