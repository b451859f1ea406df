"""A command writes a checkpoint into a directory that is empty before, and
whole after, or not there at all.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.values.errors import ConfigError, Unavailable

# Another try may do: a disk is full, or a limit of the process is reached.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def require_empty(directory: Path, hint: str) -> None:
    """Raise ConfigError, which ends with `hint`, for a directory that may be a checkpoint of hours."""
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
    """Yield a directory beside it to write into, which takes its place at the end, or is gone.

    Of two processes that want the same one the second calls `wait`, and then waits. What lies under
    `directory` is replaced, unless `is_there` says, once it is our turn, that there is nothing to do: then
    what is written goes nowhere. A process that is killed leaves its directory beside, and the next one
    begins with that.

    Raises:
        ConfigError: It cannot be written.
        Unavailable: The disk is full.
    """
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
            if not is_moved:  # Else the next one has begun there.
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _alone_in(partial: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Let nobody else write there for as long as the context is. The kernel lets go of it if we die."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor, wait)
            if _is_still(partial, descriptor):
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
    """Say whether nobody who held it before has moved it away."""
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
