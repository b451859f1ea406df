"""SGLang's processes leave shared memory when they are killed: it is in no one's way until the tmpfs is full.

    sgl_shm_<kind>_<pid>_<random>    made by <pid>; of kind mq it keeps it open, others go by name, and
                                     nobody may have them open for a while
    sglang_loads_<name>_<hash>.shm   kept open by the schedulers that write it

Containers can share the tmpfs and not the pids, so that who seems dead may live. So the kernel decides: it
grants a read lease on a file only if nobody has it open, or mapped, for writing. Where it grants none at all,
everything stays.
"""

import fcntl
import os
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path

_FOLDER = Path("/dev/shm")
_KEPT_OPEN = ("sgl_shm_mq_*", "sglang_loads_*.shm")
_WITH_PID = "sgl_shm_*_*_*"
_HANDED_OVER_S = 600.0  # By then it has been, or whoever was to get it is gone.
_BIRTH_ERROR_S = 2.0  # Births are reckoned from when the machine was booted, in whole seconds.


def remove_orphans() -> None:
    """Remove those of our user that nobody can need any more, whoever left them."""
    for path in (path for pattern in _KEPT_OPEN for path in _FOLDER.glob(pattern)):
        _remove_unless_open(path)
    for path in _FOLDER.glob(_WITH_PID):
        if not Path(f"/proc/{_maker(path)}").exists():
            _remove_unless_open(path, until_s=time.time() - _HANDED_OVER_S)


def remove_of(dead: Mapping[int, float]) -> None:
    """Remove those that children of ours made, who have ended; `dead` says by pid when they were born."""
    for path in _FOLDER.glob(_WITH_PID):
        born_s = dead.get(_maker(path))
        if born_s is not None:
            _remove_unless_open(path, since_s=born_s - _BIRTH_ERROR_S)


def _maker(path: Path) -> int:
    told = path.name.split("_")[-2]
    return int(told) if told.isdecimal() else os.getpid()


def _remove_unless_open(path: Path, since_s: float = -inf, until_s: float = inf) -> None:
    with suppress(OSError):  # It is gone already, another user's, or open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            if ours and since_s <= found.st_mtime <= until_s:
                _take_lease(descriptor)
                path.unlink()
        finally:
            os.close(descriptor)


def _take_lease(descriptor: int) -> None:
    """Take a lease until it is closed. Raises OSError if somebody has the file open for writing, or none can
    be had.

    Who opens it meanwhile waits until we close it, and a signal tells us: one that does not end us.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
