"""This module finds what a cluster leaves on its machine: processes, by a mark in their environment, and
shared memory."""

import contextlib
import os
import re
import signal
from pathlib import Path

_SHM = Path("/dev/shm")
_SYSV = Path("/proc/sysvipc/shm")


def marked_processes(name: str, value: str) -> dict[int, str]:
    """Command lines, by pid, of all living processes that were started with NAME=VALUE."""
    found, mark = {}, f"{name}={value}\0".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and mark in b"\0" + (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def signal_all(pids: "dict[int, str]", number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def shared_memory() -> frozenset[str]:
    """Segments of both kinds, by name; POSIX's only where nobody has them open or mapped."""
    posix = {f"{_SHM}/{path.name}" for path in _SHM.iterdir()} if _SHM.is_dir() else set()
    return frozenset({*(posix - _in_use()), *_unattached()})


def _in_use() -> set[str]:
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit():
                found |= set(re.findall(rf"{_SHM}/\S+", (process / "maps").read_text()))
                found |= {os.readlink(link) for link in (process / "fd").iterdir()}
    return found


def _unattached() -> set[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in _SYSV.read_text().splitlines()]
        columns = rows[0]
        return {
            f"System V segment {row[columns.index('shmid')]}"
            for row in rows[1:]
            if row[columns.index("nattch")] == "0"
        }
    return set()
