"""This module measures the memory of this machine, or of the container we are in."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC, _CGROUP, _OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MOUNTS, _IN_MEMORY = Path("/proc/self/mountinfo"), ("tmpfs", "ramfs")


class _Cgroups(NamedTuple):
    """This says where one version of cgroups keeps a group's limit and what it uses."""

    folder: str
    controllers: str  # The middle field of its line in /proc/self/cgroup.
    limit: str
    used: str
    cached: tuple[str, str]


_VERSIONS = (
    _Cgroups("", "", "memory.max", "memory.current", ("active_file ", "inactive_file ")),
    _Cgroups(
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file ", "total_inactive_file "),
    ),
)


def available_bytes(meminfo: Path = _PROC, cgroup: Path = _CGROUP, own: Path = _OWN) -> int | None:
    """Return what is free without swapping, by proc(5), and within our cgroups' limits; None if unknown."""
    amounts = _meminfo_bytes(meminfo, "MemAvailable")
    for version, group in _groups(cgroup, own):
        with suppress(OSError, ValueError):  # "max" means that there is no limit.
            limit = int((group / version.limit).read_text())
            used = int((group / version.used).read_text())
            amounts.append(limit - used + _cached_bytes(group, version.cached))
    return min(amounts, default=None)


def total_bytes(meminfo: Path = _PROC, cgroup: Path = _CGROUP, own: Path = _OWN) -> int | None:
    amounts = _meminfo_bytes(meminfo, "MemTotal")
    for version, group in _groups(cgroup, own):
        with suppress(OSError, ValueError):
            amounts.append(int((group / version.limit).read_text()))
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


def _groups(cgroup: Path, own: Path) -> Iterator[tuple[_Cgroups, Path]]:
    """Yield the visible root cgroups, in a container the container's own, and those down to ours."""
    lines: list[str] = []
    with suppress(OSError):
        lines = own.read_text().splitlines()
    for version in _VERSIONS:
        inner = cgroup / version.folder
        yield version, inner
        fields = (line.split(":", 2) for line in lines)
        path = next((field[2] for field in fields if field[1] == version.controllers), "/")
        for name in path.split("/")[1:]:
            if name not in ("", ".."):
                inner /= name
                yield version, inner


def _cached_bytes(group: Path, names: tuple[str, str]) -> int:
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
