"""A process of SGLang's connects to our service by the service's Unix socket.

A caller that reports never waits: a thread writes what the socket does not accept at once. Reports of one
process arrive in order, and none is lost while both live; a service that ends takes its SGLang with it.

A loop of ours, in a thread beside the scheduler, serves the Handshake; it reports every few seconds that it
runs, and a few times a second the rank's load, which SGLang would report over HTTP.
"""

import asyncio
import logging
import queue
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from services.engine.sglang import reports
from services.engine.sglang.plugin_settings import PluginSettings
from services.engine.sglang.reports import ORDERS, Load, Order, Report

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_MOST_BYTES = 16 << 20  # No more bytes of orders are read at a time, since a scheduler has its steps to do.
_REST_WAIT_MS = 5


class Reporter:
    """`report` may be called from any thread, `orders` from one."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._late: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # These are not written yet; while there are some, new reports are queued after them.
        self._num_late = 0
        self._lock = threading.Lock()
        self._splitter = reports.LineSplitter()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._comes = False  # The last read or wait found something.
        threading.Thread(target=self._write_late, name="isthmus-reports", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are orders."""
        return self._socket.fileno()

    def report(self, report: Report) -> None:
        line = reports.encode(report)
        with self._lock:
            rest = line if self._num_late else self._write_now(line)
            if rest:
                self._num_late += 1
                self._late.put(rest)

    def orders(self) -> list[Order]:
        """Return the orders that have arrived; wait only for the rest of one. Raises ProtocolError."""
        orders: list[Order] = []
        left = _MOST_BYTES
        while left > 0 and ((received := self._received()) or self._rest_comes()):
            orders += [reports.decode(line, ORDERS) for line in self._splitter.feed(received)]
            left -= len(received)
        return orders

    def _rest_comes(self) -> bool:
        """Return whether the rest of an order arrives soon, since a socket holds only some 200 KB.

        The service continues to write when the first part has been read. Without this wait, a long prompt
        would take a step for each of its parts. A service that hangs is waited for once.
        """
        if self._comes and self._splitter.has_begun:
            self._comes = bool(self._poll.poll(_REST_WAIT_MS))
            return self._comes
        return False

    def _received(self) -> bytes:
        """Return the received bytes; after the service's end, which ends this process, there are none."""
        try:
            received = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            received = b""
        self._comes = bool(received)
        return received

    def _write_now(self, line: bytes) -> bytes:
        try:
            return line[self._socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return line
        except OSError as error:
            log.error("sglang_reports_lost error=%s", error)
            return b""

    def _write_late(self) -> None:
        while True:
            rest = self._late.get()
            try:
                self._socket.sendall(rest)
            except OSError as error:
                log.error("sglang_reports_lost error=%s", error)
            with self._lock:
                self._num_late -= 1


@cache
def process_reporter() -> Reporter:
    return Reporter(PluginSettings.from_environment().reports_path)


# This is the pause between reports. A scheduler publishes every few steps, and all the time while it spins.
LOAD_S = 0.25
_SECTIONS = {"core", "disagg"}

_published: list[Any] = []  # The last one that has not been reported is here.


def note_load(snapshot: Any, *_args: Any, **_kwargs: Any) -> None:
    """Keep the load, after Scheduler.publish_load_snapshot, which returns None where it does not publish."""
    if snapshot is not None:
        _published[:] = [snapshot]


def report_load() -> None:
    """Report the last load, on a thread of ours, so that the one before an idle time is reported, too."""
    if _published:
        process_reporter().report(Load(_published.pop().to_dict(_SECTIONS)))


T = TypeVar("T")
BEAT_S = 5.0


class LoopThread:
    """An asyncio loop runs in its own thread until the process ends, whose main thread must not wait."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def every(self, pause_s: float, function: Callable[[], Any]) -> None:
        """Call it on the loop now, and again each `pause_s`, whatever it raises.

        The first of consecutive failures is logged.
        """
        failed = False

        def call() -> None:
            nonlocal failed
            self._loop.call_later(pause_s, call)
            try:
                function()
            except Exception:
                if not failed:
                    log.exception("regular_call_failed")
                failed = True
            else:
                failed = False

        self.soon(call)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
