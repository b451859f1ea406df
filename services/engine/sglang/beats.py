"""The loops that carry the Handshake, in SGLang's processes, report every few seconds that they run.

Time is counted in looks, as everywhere: whoever looks may have stood still itself. SGLang watches its
schedulers (`--watchdog-timeout`); of our thread beside them it knows nothing, and its transfers would wait
for ever.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

BEAT_S = 5.0
_LOOK_S = 1.0
_SILENT_LOOKS = 60  # A supervisor waits as long for a rank.
T = TypeVar("T")
log = logging.getLogger(__name__)


class Beats:
    def __init__(self) -> None:
        self._looks: dict[int, int] = {}  # By pid it counts the looks since the last beat.

    def heard(self, pid: int) -> None:
        self._looks[pid] = 0

    def look(self) -> list[int]:
        """Return those that have beaten before and are silent now."""
        self._looks = {pid: looks + 1 for pid, looks in self._looks.items()}
        return [pid for pid, looks in self._looks.items() if looks >= _SILENT_LOOKS]

    async def until_silent(self) -> list[int]:
        """Wait until some that have beaten are silent, and return them."""
        while not (silent := self.look()):
            await asyncio.sleep(_LOOK_S)
        return silent


class LoopThread:
    """An asyncio loop runs in a thread of its own until the process ends, whose main thread must not wait."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def every(self, pause_s: float, function: Callable[[], Any]) -> None:
        """Call it on the loop now, and again each `pause_s`, whatever it raises.

        The first of failures in a row is logged.
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
