"""An output stream keeps a decode rank's reports on one request until they are read.

    put_token, put_token ...  --> tokens --+
    put(first), put(last), put(error) -----+--> next(), which returns all that has arrived

The reader wakes once for all that has arrived; while the router is short of time, a moment later.

Coalescing lets tokens wait a moment, so that several of a request go to its client in one message, which
costs the router the same for one token as for ten. While the router has time to spare, no token waits. While
its loop's thread is short of time, tokens wait as long as needed to have some again, but never longer than
--coalesce-ms. The first token and the end, for which a client waits most, never wait; nor does a token of a
request whose tokens are further apart, as no other would join it. When the longest wait is reached, the
tokens are apart because the router is late, so all wait.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from services.values.errors import DeadlineExceeded, IsthmusError
from services.values.request import Output

_SAMPLE_S = 0.2
_LEAST_S = 0.002
_SHORT_OF_TIME, _TIME_TO_SPARE = 0.8, 0.6
_GROWS, _SHRINKS = 1.5, 0.8


class Window:
    """Tokens wait for the seconds of a window, which opens while the thread is too busy. It is pure."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.now_s = 0.0

    @property
    def is_widest(self) -> bool:
        return self.now_s >= self._most_s

    def heed(self, busy: float) -> None:
        """Adjust the window to `busy`, the share of the time in which the thread ran or was ready to run."""
        if busy > _SHORT_OF_TIME:
            self.now_s = min(self._most_s, max(_LEAST_S, _GROWS * self.now_s))
        elif busy < _TIME_TO_SPARE:
            self.now_s *= _SHRINKS
            if self.now_s < _LEAST_S:
                self.now_s = 0.0


def busy_s() -> float:
    """Return the seconds in which this thread ran or was ready to run (proc(5): schedstat)."""
    with suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    return time.thread_time()


class Coalescing:
    """A loop has one. The waiting tokens of all streams are released together."""

    def __init__(
        self,
        most_s: float,
        clock: Callable[[], float] = time.monotonic,
        busy_s: Callable[[], float] = busy_s,
    ) -> None:
        self.clock = clock
        self._window = Window(most_s)
        self._busy_s = busy_s
        self._sampled = clock(), busy_s()
        self._held: list[OutputStream] = []

    @property
    def window_s(self) -> float:
        return self._window.now_s

    def hold(self, waiting: "OutputStream", now_s: float, since_s: float) -> bool:
        """Return whether the stream must wait, whose last token came at `since_s`. It is then released in a
        moment, once for each time that it was held."""
        self._sample(now_s)
        if now_s - since_s >= self._window.now_s and not self._window.is_widest:
            return False
        if not self._held:
            asyncio.get_running_loop().call_later(self._window.now_s, self._release)
        self._held.append(waiting)
        return True

    def _sample(self, now_s: float) -> None:
        since, busy_before = self._sampled
        if now_s - since >= _SAMPLE_S:
            busy = self._busy_s()
            self._window.heed((busy - busy_before) / (now_s - since))
            self._sampled = now_s, busy

    def _release(self) -> None:
        held, self._held = self._held, []
        for waiting in held:
            waiting.release()


class RankClient(Protocol):
    def send_abort(self, request_id: str) -> None: ...

    def forget(self, request_id: str) -> None: ...


class OutputStream:
    def __init__(
        self,
        client: RankClient,
        request_id: str,
        timeout_s: float | None = None,
        coalescing: Coalescing | None = None,
    ) -> None:
        """The stream ends with DeadlineExceeded after `timeout_s`: one timer replaces one for each `next`."""
        self._client = client
        self._request_id = request_id
        self._coalescing = coalescing
        self._items: deque[Output | IsthmusError] = deque()
        self._token_ids: list[int] = []  # These came after the items, with nothing else to report.
        self._came = asyncio.Event()  # This is set where there is an item and no reason to wait for more.
        self._waits = False
        self._last_tokens_s = -math.inf  # The last tokens came at this time.
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def put_token(self, token_id: int, now_s: float) -> None:
        """Add a token without any other report; `now_s` is on the clock of `coalescing`."""
        self._token_ids.append(token_id)
        if not self._is_held(now_s):
            self._came.set()

    def put(self, item: Output | IsthmusError) -> None:
        self._close_tokens()
        self._items.append(item)
        self._ended = isinstance(item, IsthmusError) or item.finished is not None
        if self._ended or self._coalescing is None or not self._is_held(self._coalescing.clock()):
            self._came.set()

    def _close_tokens(self) -> None:
        if self._token_ids:
            self._items.append(Output(tuple(self._token_ids)))
            self._token_ids.clear()

    def _is_held(self, now_s: float) -> bool:
        """Return whether the item waits for others of its request. A reader that has not read the last items
        yet will get it with them."""
        since_s, self._last_tokens_s = self._last_tokens_s, now_s
        if self._waits or self._coalescing is None or self._came.is_set():
            return self._waits
        self._waits = self._coalescing.hold(self, now_s, since_s)
        return self._waits

    def release(self) -> None:
        self._waits = False
        if self._items or self._token_ids:
            self._came.set()

    def _expire(self) -> None:
        self._close_tokens()
        self._items.append(DeadlineExceeded("the deadline has passed"))  # It still runs there.
        self._came.set()

    async def next(self, *, all_at_once: bool = False) -> Output:
        """Return the next output, or with `all_at_once` all of them as one; the first one comes alone, as it
        reports when the first token came. Tokens without any other report are joined. Raises the error that
        ended the request."""
        if not self._came.is_set():
            await self._came.wait()
        self._close_tokens()
        item = self._items.popleft()
        if all_at_once and isinstance(item, Output) and item.admitted is None:
            while self._items and isinstance(later := self._items[0], Output):
                item = item.followed_by(later)
                self._items.popleft()
        if not self._items:
            self._came.clear()
        if isinstance(item, IsthmusError):
            raise item
        return item

    def abort(self) -> None:
        """Request an early end; the last output then finishes with ABORTED."""
        self._client.send_abort(self._request_id)

    def close(self) -> None:
        """Forget the request, and stop it if it still runs."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended:
            self.abort()
        self._client.forget(self._request_id)
