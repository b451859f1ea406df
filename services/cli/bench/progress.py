"""A bar while a load runs, at a terminal."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.cli.bench.meter import Meter

_EVERY_S = 0.25


@asynccontextmanager
async def shown(meter: Meter, total: int, console: Console | None = None) -> AsyncIterator[None]:
    """On standard error; nothing where that is no terminal."""
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.completed}/{task.total}"), BarColumn(None), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=console, transient=True) as progress:
        bar = progress.add_task("", total=total, now=now(meter))
        following = asyncio.create_task(_follow(meter, progress, bar))
        try:
            yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


async def _follow(meter: Meter, progress: Progress, bar: TaskID) -> None:
    while True:
        progress.update(bar, completed=meter.completed + meter.errors.total(), now=now(meter))
        await asyncio.sleep(_EVERY_S)


def now(meter: Meter) -> str:
    """Short enough to stand beside a bar in 80 columns."""
    failed = f"  {meter.errors.total()} failed" if meter.errors else ""
    ttft_ms, itl_ms = 1e3 * meter.ttft.mean, 1e3 * meter.itl.mean
    return f"{meter.running} running  TTFT {ttft_ms:.0f} ms  ITL {itl_ms:.1f} ms{failed}"
