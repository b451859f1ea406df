"""SGLang kills itself at its end, or is killed: this removes what it leaves in folders and shared memory.

A worker has a folder for temporary files, including SGLang's, which would stay: the files of its metrics, and
those that its sockets are named after. `open` removes the folders of dead workers, then creates and locks one
of its own. `close` removes it. When a worker is killed the kernel releases the lock, and the next `open`
removes the folder.

Shared memory does no harm until the tmpfs is full. A file sgl_shm_<kind>_<pid>_<random> was created by <pid>;
kind mq stays open, others are passed by name, and may be open nowhere for a while. A file
sglang_loads_<name>_<hash>.shm is kept open by the schedulers that write it.

Containers can share the tmpfs and not the pids, so a process that seems dead may live. So the kernel decides:
it grants a read lease on a file only if nobody has it open, or mapped, for writing. Where it grants none at
all, everything stays.
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
_HANDED_OVER_S = 600.0  # By then the file has been passed on, or its receiver is gone.
_BIRTH_ERROR_S = 2.0  # Times of birth are computed from the boot time, which is in whole seconds.


def remove_orphans() -> None:
    """Remove the files of our user that nobody can need any more, whoever left them."""
    for path in (path for pattern in _KEPT_OPEN for path in _FOLDER.glob(pattern)):
        _remove_unless_open(path)
    for path in _FOLDER.glob(_WITH_PID):
        if not Path(f"/proc/{_maker(path)}").exists():
            _remove_unless_open(path, until_s=time.time() - _HANDED_OVER_S)


def remove_of(dead: Mapping[int, float]) -> None:
    """Remove the files that ended children of ours created; `dead` has their times of birth by pid."""
    for path in _FOLDER.glob(_WITH_PID):
        born_s = dead.get(_maker(path))
        if born_s is not None:
            _remove_unless_open(path, since_s=born_s - _BIRTH_ERROR_S)


def _maker(path: Path) -> int:
    pid = path.name.split("_")[-2]
    return int(pid) if pid.isdecimal() else os.getpid()


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
    """Take a lease until the file is closed. Raises OSError if it is open for writing, or without leases.

    A process that opens it meanwhile waits until we close it, and a signal that does not end us reports that.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)


_PREFIX = "isthmus-worker-"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """It belongs to one incarnation of one worker. Our child processes do not inherit the lock."""

    path: Path
    lock: int  # This is a descriptor of the folder itself.

    @classmethod
    def open(cls) -> "RunFolder":
        """Create a folder for temporary files.

        This removes the folders of killed workers, and what SGLang left in shared memory.
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
        """Return the environment of a process with its temporary files here; compiled code is kept."""
        environment = {**inherited, "TMPDIR": str(self.path)}
        # It is not the first variable: torch sets it again, and setproctitle would find no title to change.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        return environment

    def close(self) -> None:
        """Remove the folder; the next worker removes what a process that is still ending writes later."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _lock(path: Path) -> int | None:
    """Return a locked descriptor, or None where another worker removed the new folder as a dead worker's."""
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
