"""This module ends a process on a signal."""

import asyncio
import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, from now to the end of the running loop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Wrap everything that a service's process does, including imports of large libraries.

    Until a loop calls `stop_on_signals`, SIGINT ends the process as SIGTERM does. Python would raise
    KeyboardInterrupt anywhere, and we saw libraries swallow that during their import.

    A thread that still computes at the end, such as one that loads a model, is left behind. When Python ends,
    it would end such a thread as soon as it asks for the interpreter, which unwinds its stack through C++
    code that forbids it, and std::terminate aborts the process. Functions registered with atexit run before.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ending_as_first_process(signal.SIGTERM, signal.SIGINT)
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


def ending_as_first_process(*numbers: signal.Signals) -> None:
    """Let the signals end us at once where we are the first process of a container.

    Linux drops signals whose action is the default one when they are sent to such a process. A pod that was
    deleted while its model loaded went on until its grace was over.
    """
    if os.getpid() == 1:
        for number in numbers:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _others_run() -> bool:
    return any(thread.daemon for thread in threading.enumerate())


def _leave(code: object) -> None:
    """Exit as sys.exit(code) does, but without Python's finalization."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The stream may have no reader, or be closed.
            stream.flush()
    os._exit(code or 0)
