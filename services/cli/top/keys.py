"""Keys of a terminal, one by one, without Enter."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

_LEAVE = frozenset(b"qQ\x03\x04")  # Ctrl-C and Ctrl-D too, where they come as characters


@contextlib.contextmanager
def leaving(leave: Callable[[], None]) -> Iterator[None]:
    """Within it q calls `leave`, and what is typed is not shown; without a terminal to type at, nothing."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        if not typed:  # it has hung up
            loop.remove_reader(descriptor)
        if not typed or _LEAVE.intersection(typed):
            leave()

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSADRAIN)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
