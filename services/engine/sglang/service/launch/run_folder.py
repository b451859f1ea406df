"""A worker's folder for temporary files, SGLang's among them, which would stay: SGLang ends by killing
itself, with the files of its metrics, and never removes what its sockets are named after.

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
    """For one life of one worker. Our child processes do not inherit the lock."""

    path: Path
    lock: int  # a descriptor of the folder itself

    @classmethod
    def open(cls) -> "RunFolder":
        """Where temporary files are kept. Removes those of workers that have been killed, and what SGLang
        left in shared memory."""
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
        """Of a process whose temporary files are to lie here; what it compiles is for its next life too."""
        environment = {**inherited, "TMPDIR": str(self.path)}
        # Not as the first variable: torch sets it anew, and setproctitle would find no title to change.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        return environment

    def close(self) -> None:
        """What a process that is still ending writes afterwards is removed by the next worker."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _lock(path: Path) -> int | None:
    """None: another worker took the new folder for a dead one's, and has removed it."""
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
    with suppress(OSError):  # gone already, another user's, or alive
        descriptor = _open_folder(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
