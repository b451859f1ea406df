"""This module writes a checkpoint into an empty directory as a whole: a failure leaves nothing behind."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.values.errors import ConfigError, Unavailable

# A retry may succeed after these: a disk is full, or a limit of the process is reached.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def require_empty(directory: Path, hint: str) -> None:
    """Raise ConfigError, which ends with `hint`, if the directory is not empty: that may be hours of work."""
    try:
        found = sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error}") from error
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    if found:
        raise ConfigError(f"{directory} is not empty ({shown}); {hint}")


@contextmanager
def written_whole(directory: Path, is_there: Callable[[], bool], wait: Callable[[], None]) -> Iterator[Path]:
    """Yield a temporary directory beside `directory`, which replaces it at the end, or is removed after an
    error.

    If another process writes the same one, `wait` is called once, and then we wait for the lock. If
    `is_there` returns true at the end, `directory` stays as it is, and what was written is removed. A process
    that is killed leaves its temporary directory, which the next one clears.

    Raises ConfigError if the directory cannot be written, and Unavailable if the disk is full, or a limit of
    the process is reached."""
    partial = directory.parent / f".{directory.name}.partial"
    with _writing(directory), _alone_in(partial, wait):
        _clear(partial)
        is_moved = False
        try:
            yield partial
            if not is_there():
                shutil.rmtree(directory, ignore_errors=True)
                partial.rename(directory)
                is_moved = True
        finally:
            if not is_moved:  # After the rename the next process may have begun there.
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _alone_in(partial: Path, wait: Callable[[], None]) -> Iterator[None]:
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor, wait)
            if _is_still(partial, descriptor):  # Otherwise its last holder has renamed it.
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = Unavailable if error.errno in _PASSING else ConfigError
        raise kind(f"cannot write to {directory}: {error}") from error
