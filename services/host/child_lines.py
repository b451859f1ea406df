"""This module reads what a child process writes, line by line.

Whoever reads it must go on as long as the child does, or the child waits for ever in a write to a full pipe.
"""

import asyncio
from collections.abc import AsyncIterator

_CHUNK_BYTES = 1 << 16


async def child_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines without their ends, until the stream's; one that is very long comes in pieces."""
    pending = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield _text(line)
        if len(pending) >= _CHUNK_BYTES:
            yield _text(pending)
            pending = b""
    if pending:
        yield _text(pending)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
