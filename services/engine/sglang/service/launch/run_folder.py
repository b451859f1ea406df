"""A worker has a folder for temporary files, SGLang's among them, which would stay.

SGLang ends by killing itself, with the files of its metrics, and never removes what its sockets are named
after.

    open: of dead workers, removed --> made --> locked --> close: removed
                                                  +--killed: the kernel takes the lock away--> the next open
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.engine.sglang.service.launch import shared_memory

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
        shared_memory.remove_orphans()
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
