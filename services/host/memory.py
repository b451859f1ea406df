"""How much memory this machine, or the container we are in, has to give."""

from contextlib import suppress
from pathlib import Path

_PROC, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Without swapping, by proc(5), and within the limit of a cgroup v2. None: nobody tells."""
    amounts = []
    with suppress(OSError):
        told = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in told:
            amounts.append(int(told["MemAvailable"].split()[0]) << 10)
    with suppress(OSError, ValueError):  # no limit is written as "max"
        limit = int((cgroup / "memory.max").read_text())
        amounts.append(limit - int((cgroup / "memory.current").read_text()) + _cached_bytes(cgroup))
    return min(amounts, default=None)


def _cached_bytes(cgroup: Path) -> int:
    """Of files, which the kernel gives up first."""
    lines = (cgroup / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
