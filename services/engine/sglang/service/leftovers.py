"""SGLang ends by killing itself, or is killed: what it leaves in folders and shared memory is removed here.

A worker has a folder for temporary files, SGLang's among them, which would stay: the files of its metrics,
and what its sockets are named after.

    open: of dead workers, removed --> made --> locked --> close: removed
                                                  +--killed: the kernel takes the lock away--> the next open

Shared memory is in no one's way until the tmpfs is full.

    sgl_shm_<kind>_<pid>_<random>    made by <pid>; of kind mq it keeps it open, others go by name, and
                                     nobody may have them open for a while
    sglang_loads_<name>_<hash>.shm   kept open by the schedulers that write it

Containers can share the tmpfs and not the pids, so that who seems dead may live. So the kernel decides: it
grants a read lease on a file only if nobody has it open, or mapped, for writing. Where it grants none at all,
everything stays.
"""

import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
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


_PREFIX = "isthmus-worker-"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """It is for one incarnation of one worker. Our child processes do not inherit the lock."""

    path: Path
    lock: int  # It is a descriptor of the folder itself.

    @classmethod
    def open(cls) -> "RunFolder":
        """Make a folder where temporary files are kept.

        Those of workers that have been killed are removed, and what SGLang left in shared memory.
        """
        root = Path(tempfile.gettempdir())
        for path in root.glob(f"{_PREFIX}*"):
            _remove_if_dead(path)
        remove_orphans()
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            lock = _lock(path)
            if lock is not None:
                return cls(path, lock)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process whose temporary files are to lie here; what it compiles is for
        its next start too."""
        environment = {**inherited, "TMPDIR": str(self.path)}
        # It is not the first variable: torch sets it anew, and setproctitle would find no title to change.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        return environment

    def close(self) -> None:
        """Remove the folder; what a process that is still ending writes afterwards the next worker
        removes."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _lock(path: Path) -> int | None:
    """Return a locked descriptor, or None where another worker took the new folder for a dead one's, and has
    removed it."""
    try:
        descriptor = _open_folder(path)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if path.exists():
        return descriptor
    os.close(descriptor)
    return None


def _remove_if_dead(path: Path) -> None:
    with suppress(OSError):  # It is gone already, another user's, or alive.
        descriptor = _open_folder(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
