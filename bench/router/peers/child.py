"""A peer's process, with its output in a file."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.host.child_processes import dying_with_us


@asynccontextmanager
async def child(command: Sequence[str], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *dying_with_us([*command]), env=environment, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
