"""An asyncio loop in a thread of its own, inside a process whose main thread must not wait."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class LoopThread:
    """Runs until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it on the loop; returns at once. From any thread."""
        self._loop.call_soon_threadsafe(function, *args)

    def every(self, pause_s: float, function: Callable[[], Any]) -> None:
        """Call it on the loop now, and again each `pause_s`, whatever it raises. The first of failures in
        a row is logged."""
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
