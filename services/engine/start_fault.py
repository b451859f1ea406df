"""Faults at an engine's start are told apart: what another start will meet again, and what may pass by then.

    ConfigError    a setting, the checkpoint, or what is installed: the same next time
    Unavailable    memory that others hold, a device that is lost, a file system that hiccups

A first start ends its worker with the former only (services/process/supervisor.py).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from services.values.errors import ConfigError, Unavailable

# These come of a file's name. Whatever else a kernel says of one (EIO, ESTALE, EMFILE ...) may pass.
_LASTING_ERRNOS = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
    )
)
# These are torch's own, by name: torch stays out of here. Older ones, and its libraries, raise RuntimeError.
_PASSING_CLASSES = frozenset(("OutOfMemoryError", "AcceleratorError"))
_PASSING_WORDS = ("out of memory", "can't allocate memory", "CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")
# This torch was not built for this GPU, the driver is older than it, or cuBLAS has no such product here.
_LASTING_WORDS = (
    "no kernel image",
    "invalid device function",
    "driver version is insufficient",
    "STATUS_NOT_SUPPORTED",
    "STATUS_INVALID_VALUE",
    "STATUS_ARCH_MISMATCH",
)


def start_fault(message: str, error: BaseException) -> ConfigError | Unavailable:
    """Return what to raise, with `message`, where `error` kept an engine from starting."""
    return (Unavailable if may_pass(error) else ConfigError)(message)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an OSError into ConfigError, or into Unavailable where another try may do."""
    try:
        yield
    except OSError as error:
        raise start_fault(f"{what} cannot be read: {error}", error) from error


def may_pass(error: BaseException) -> bool:
    """Return whether another start may be spared it, as far as the error, or what it came from, says."""
    return any(map(_passes, _with_origins(error)))


def _passes(error: BaseException) -> bool:
    if isinstance(error, OSError):  # Without a number it is a library's word on what is in a file.
        return error.errno is not None and error.errno not in _LASTING_ERRNOS
    if isinstance(error, MemoryError | Unavailable):
        return True
    text = str(error)
    if any(words in text for words in _LASTING_WORDS):
        return False
    if type(error).__name__ in _PASSING_CLASSES:
        return True
    return isinstance(error, RuntimeError) and any(words in text for words in _PASSING_WORDS)


def _with_origins(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    origin: BaseException | None = error
    while origin is not None and id(origin) not in seen:
        seen.add(id(origin))
        yield origin
        origin = origin.__cause__ or (None if origin.__suppress_context__ else origin.__context__)
