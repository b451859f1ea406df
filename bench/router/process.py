"""This module reads what the kernel says of processes."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of all its threads, in steps of 10 ms (proc(5), stat)."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def tree_cpu_s(pid: int) -> float:
    """The same of it and of all that it has started and that still run."""
    return sum(map(cpu_s, _tree(pid)))


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                children.setdefault(int(_fields(int(folder.name))[1]), []).append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
    found = [pid]
    for each in found:  # it grows meanwhile
        found += children.get(each, ())
    return found


def _fields(pid: int) -> list[str]:
    """Return the fields from the state on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
