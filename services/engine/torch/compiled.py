"""Machine code that numba compiles is kept on disk, where the next process that starts reads it.

`compiled()` decorates a kernel that Python calls; numba looks for its machine code first. `inner()` decorates
a function that only kernels call and that becomes a part of their code.

numba's key is the function, the modification time of its file, the types and the processor, but not the
functions of other files that are compiled into it. So the code lies in a folder named after the sources of
all kernels, below NUMBA_CACHE_DIR or the user's cache. Where the folder cannot be written, or a file is
broken, the code is compiled again. Of several processes that start at once, one compiles.

The first prompt and the first single token of a rank take 0.05 s of CPU time if the code is read, and 12 s if
it is compiled (a Llama, float32).
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

log = logging.getLogger(__name__)

_ROOM = Path(__file__).parent
_PATIENCE_S = 60.0  # A process waits so long for the one that compiles; a kernel takes a tenth of it.
_LOOK_S = 0.05


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    jit = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = jit(function)
        if (folder := kernels_folder()) is not None:
            keep(dispatcher, function, folder)
        return dispatcher

    return decorate


def inner() -> Any:
    return njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)


def keep(dispatcher: Any, function: Callable[..., Any], folder: Path) -> None:
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        dispatcher._cache = _Kept(function)
    finally:
        config.CACHE_DIR = before


class CompileLock:
    """One process at a time has the lock to compile, if the disk supports locks.

    The lock ends with the process.
    """

    def __init__(self, path: Path, patience_s: float = _PATIENCE_S) -> None:
        self._path = path
        self._patience_s = patience_s
        self._file: IO[bytes] | None = None

    def take(self) -> bool:
        """Wait for the lock, and return whether another process had it meanwhile.

        After `patience_s` this goes on without the lock.
        """
        if self._file is not None:
            return False
        began = time.monotonic()
        try:
            self._file = self._path.open("ab")
            while not self._is_ours(self._file):
                if time.monotonic() - began > self._patience_s:
                    log.warning("kernels_turn_not_had path=%s waited_s=%.0f", self._path, self._patience_s)
                    break
                time.sleep(_LOOK_S)
        except OSError as error:  # The folder is gone, or the disk has no locks.
            log.info("kernels_turn_not_had path=%s error=%s", self._path, error)
        return time.monotonic() - began >= _LOOK_S

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_ours(self, file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class _Kept(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, stamp)
        self._compile_lock = CompileLock(Path(self.cache_path, f"{self._impl.filename_base}.turn"))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored code, or None if this process has the lock and must compile.

        The lock ends when the code is saved.
        """
        found = self._load(sig, target_context)
        if found is None and self._compile_lock.take():
            found = self._load(sig, target_context)
        if found is not None:
            self._compile_lock.end()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # numba first reads its index, which may be broken.
            log.warning("kernel_not_kept path=%s error=%r", self.cache_path, error)
        finally:
            self._compile_lock.end()

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # Unpickling a broken file may raise any exception.
            log.warning("kernel_not_read path=%s error=%r", self.cache_path, error)
            with suppress(OSError):
                self.flush()
            return None


class _Files(IndexDataCacheFile):
    """Each file is named after its key.

    numba numbers its files. Two processes that compile for different types at once would choose the same
    number, and the next process would load code for the wrong types.
    """

    def save(self, key: Any, data: Any) -> None:
        base = self._index_name.removesuffix(".nbi")
        name = f"{base}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})


@cache
def kernels_folder() -> Path | None:
    try:
        base = os.environ.get("NUMBA_CACHE_DIR") or Path(_user_cache(), "isthmus", "kernels")
        folder = Path(base, digest(kernel_sources()))
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # The user may have no home directory.
        log.info("kernels_not_kept error=%s", error)
        return None
    return folder if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def kernel_sources() -> list[Path]:
    return sorted([Path(__file__), _ROOM / "vector_lanes.py", *_ROOM.rglob("*_kernel.py")])


def digest(files: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
