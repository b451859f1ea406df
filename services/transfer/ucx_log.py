"""UCX's log of this process is kept in memory and read from time to time: only there UCX says how it writes.

UCX has one log file (stdout by default), and opens it when it is loaded, with the first agent. If an operator
sets UCX_LOG_FILE or UCX_PROTO_INFO, these settings stay, and no path is reported.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from services.transfer.ucx_tables import UcxTables
from services.values.kv import KvPath

log = logging.getLogger(__name__)

_KEPT_BYTES = 1 << 20
_libc = ctypes.CDLL(None)

# These are UCX's own defaults. The names are put into the environment when this is imported, while there is
# one thread: the C library moves the environment for each new name, and a thread that reads it meanwhile, as
# calls into gRPC do, would read freed memory. A new value for a known name moves nothing.
_DEFAULTS = {"UCX_LOG_FILE": "", "UCX_PROTO_INFO": "n", "UCX_LOG_LEVEL": "warn"}
# This lists the names that we set, because a process that inherits them cannot tell by their values.
_OURS = "ISTHMUS_UCX_NAMED"
if _OURS not in os.environ:
    os.environ[_OURS] = ",".join(name for name in _DEFAULTS if name not in os.environ)
UNTOLD = {name: _DEFAULTS[name] for name in os.environ[_OURS].split(",") if name in _DEFAULTS}
for _name, _value in UNTOLD.items():
    os.environ.setdefault(_name, _value)


def is_unset(name: str) -> bool:
    """Return whether the variable has the default that we set, rather than an operator's value."""
    return name in UNTOLD and os.environ.get(name) == UNTOLD[name]


def quieten() -> None:
    """Set UCX's log level. This must come before the first agent, with which UCX is loaded."""
    if is_unset("UCX_LOG_LEVEL"):
        os.environ["UCX_LOG_LEVEL"] = "error"


class UcxLog:
    def __init__(self) -> None:
        self._file = os.memfd_create("ucx-log")  # It is never closed, because UCX writes to it.
        self._read_bytes = 0
        self._rest = ""
        self._tables = UcxTables()
        self._lock = threading.Lock()

    @contextmanager
    def set_for_ucx(self) -> Iterator[None]:
        """Put the log's name into the environment while the first agent is made.

        Child processes must not inherit it: they could not open the file, and UCX would abort them.
        """
        settings = {"UCX_LOG_FILE": f"/proc/self/fd/{self._file}", "UCX_PROTO_INFO": "y"}
        if not all(map(is_unset, settings)):  # An operator has set one of them.
            yield
            return
        os.environ.update(settings)
        try:
            yield
        finally:
            os.environ.update({name: UNTOLD[name] for name in settings})

    def paths(self, agent: str, piece_bytes: int) -> tuple[KvPath, ...]:
        """Return the paths known so far. Other lines that UCX has printed go to our log."""
        with self._lock:
            for line in self._tables.feed(self._new_lines()):
                log.warning("ucx %s", line)
            return self._tables.paths(agent, piece_bytes)

    def _new_lines(self) -> list[str]:
        _libc.fflush(None)  # UCX writes through a buffered stream.
        size = os.fstat(self._file).st_size
        if size <= self._read_bytes:
            return []
        text = os.pread(self._file, size - self._read_bytes, self._read_bytes).decode(errors="replace")
        self._forget(size)
        *lines, self._rest = (self._rest + text).split("\n")
        return [line.rstrip() for line in lines if line.strip()]

    def _forget(self, size: int) -> None:
        """Truncate the file: UCX writes on at its old offset, and the hole before that takes no memory."""
        if size - self._read_bytes > _KEPT_BYTES:
            os.ftruncate(self._file, 0)
        self._read_bytes = size


@cache
def ucx_log() -> UcxLog:
    return UcxLog()
