"""This module measures the memory of this machine, or of the container we are in."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC, _CGROUP, _OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MOUNTS, _IN_MEMORY = Path("/proc/self/mountinfo"), ("tmpfs", "ramfs")


def available_bytes(meminfo: Path = _PROC, cgroup: Path = _CGROUP, own: Path = _OWN) -> int | None:
    """Return what is free without swapping, by proc(5), and within our cgroups' limits (v2); None if
    unknown.
    """
    amounts = _meminfo_bytes(meminfo, "MemAvailable")
    for group in _groups(cgroup, own):
        with suppress(OSError, ValueError):  # "max" means that there is no limit.
            limit = int((group / "memory.max").read_text())
            amounts.append(limit - int((group / "memory.current").read_text()) + _cached_bytes(group))
    return min(amounts, default=None)


def total_bytes(meminfo: Path = _PROC, cgroup: Path = _CGROUP, own: Path = _OWN) -> int | None:
    amounts = _meminfo_bytes(meminfo, "MemTotal")
    for group in _groups(cgroup, own):
        with suppress(OSError, ValueError):
            amounts.append(int((group / "memory.max").read_text()))
    return min(amounts, default=None)


def is_in_memory(fd: int, mounts: Path = _MOUNTS) -> bool:
    """Return whether the file's file system keeps it in memory, by proc(5); False if that is unknown."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        found = (line.partition(" - ") for line in mounts.read_text().splitlines())
        return any(name == at.split()[2] and kind.split()[0] in _IN_MEMORY for at, _, kind in found)
    return False


def _meminfo_bytes(meminfo: Path, name: str) -> list[int]:
    with suppress(OSError):
        found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return [int(found[name].split()[0]) << 10] if name in found else []
    return []


def _groups(cgroup: Path, own: Path) -> Iterator[Path]:
    """Yield the visible root cgroup, which in a container is the container's own, and those down to ours."""
    yield cgroup
    with suppress(OSError):
        path = next((x[3:] for x in own.read_text().splitlines() if x.startswith("0::/")), "/")
        inner = cgroup
        for name in path.split("/")[1:]:
            if name not in ("", ".."):
                inner /= name
                yield inner


def _cached_bytes(cgroup: Path) -> int:
    lines = (cgroup / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
