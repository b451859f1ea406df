"""A process is told to end, and ends."""

import asyncio
import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, from now to the end of the running loop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Stand around all that a service's process does, imports of large libraries included.

    Until a loop asks for it (`stop_on_signals`) SIGINT ends the process as SIGTERM does. Python would raise
    KeyboardInterrupt wherever it is, and libraries that are being imported were seen to swallow that.

    A thread that still computes at the end, as one that loads a model, is left behind: at its own end Python
    has such a thread end when it comes back for the interpreter, which unwinds its stack through C++ code
    that forbids it, and std::terminate aborts the process. What is registered with atexit is done before.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
        code: object = None
    except SystemExit as error:
        if not _others_run():
            raise
        code = error.code
    except BaseException:
        if not _others_run():
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if _others_run():
        _leave(code)


def _others_run() -> bool:
    """Say whether there are threads that Python does not wait for."""
    return any(thread.daemon for thread in threading.enumerate())


def _leave(code: object) -> None:
    """End as sys.exit(code) does, but for Python's own end."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Nobody reads it, or it is closed.
            stream.flush()
    os._exit(code or 0)
