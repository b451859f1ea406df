"""This module starts a child process that does not outlive its parent, even a killed one, and reads its
lines.

The former needs Linux. A reader must go on until the child ends, or the child waits for ever to write to a
full pipe.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence

_CHUNK_BYTES = 1 << 16


async def child_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the stream's lines without their ends; a very long line comes in pieces."""
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


# linux/prctl.h defines this number.
_PR_SET_PDEATHSIG = 1

# We use a separate program instead of preexec_fn: between fork and exec a process with threads, gRPC's or
# numpy's, must run no code. We saw a child end with SIGABRT there.
_LAUNCHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv[2]), 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""


def dying_with_us(command: Sequence[str], how: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return a command that becomes `command`, which gets the signal `how` when the thread that started it
    ends.

    If that thread has ended already, nothing is started. `command` begins with the path of a program.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(how.value), *command]
