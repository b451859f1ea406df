"""An output stream keeps what a decode rank reports of one request until somebody reads it.

    put_token, put_token ...  --> tokens --+
    put(first), put(last), put(error) -----+--> next(), which takes along what has come meanwhile

Whoever reads is woken once for all that has come; while the router is short of time, a moment later.

Coalescing lets tokens wait a moment, so that several of a request go to its client in one message.

A message costs the router the same with one token as with ten. While it has time to spare none waits; while
its loop's thread is short of time, tokens wait as long as it takes to have some again, and never longer than
--coalesce-ms. What a client waits for most, the first token and the end, never does; nor does a token whose
request has them further apart than that, for no other would come to go with it. Where they have to wait the
longest it is the router that is late, and not the tokens: then all do.
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
    """Tokens wait for the seconds of a window, which opens while the thread is busier than is good. Pure."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.now_s = 0.0

    @property
    def is_widest(self) -> bool:
        return self.now_s >= self._most_s

    def heed(self, busy: float) -> None:
        """Open or close with `busy`, the share of the time since the last call in which the thread ran or
        wanted to."""
        if busy > _SHORT_OF_TIME:
            self.now_s = min(self._most_s, max(_LEAST_S, _GROWS * self.now_s))
        elif busy < _TIME_TO_SPARE:
            self.now_s *= _SHRINKS
            if self.now_s < _LEAST_S:
                self.now_s = 0.0


def busy_s() -> float:
    """Return the seconds that this thread has run, or wanted to while others did (proc(5): schedstat)."""
    with suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    return time.thread_time()


class Waiting(Protocol):
    def release(self) -> None:
        """Tell your reader what has come."""


class Coalescing:
    """A loop has one. Tokens of all streams that wait are released together."""

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
        self._held: list[Waiting] = []

    @property
    def window_s(self) -> float:
        """Return the seconds that tokens wait now at most."""
        return self._window.now_s

    def hold(self, waiting: Waiting, now_s: float, since_s: float) -> bool:
        """Return whether it is to wait, whose last token came at `since_s`. It is then released in a
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
    """An output stream asks this of its DecodeClient."""

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
        """The stream ends with DeadlineExceeded after `timeout_s`: that is one timer, where each `next`
        would need one of its own."""
        self._client = client
        self._request_id = request_id
        self._coalescing = coalescing
        self._items: deque[Output | IsthmusError] = deque()
        self._token_ids: list[int] = []  # that came behind them, with nothing else to tell
        self._came = asyncio.Event()  # there is something, and no reason to wait for more
        self._waits = False
        self._heard_s = -math.inf  # when tokens came last
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def put_token(self, token_id: int, now_s: float) -> None:
        """Take a token of which nothing else is reported; `now_s` is on the clock of `coalescing`."""
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
        """Make an output of the tokens so far: what comes next comes behind them."""
        if self._token_ids:
            self._items.append(Output(tuple(self._token_ids)))
            self._token_ids.clear()

    def _is_held(self, now_s: float) -> bool:
        """Return whether it waits for others of its request. Who is yet to read what has come will take it
        along."""
        since_s, self._heard_s = self._heard_s, now_s
        if self._waits or self._coalescing is None or self._came.is_set():
            return self._waits
        self._waits = self._coalescing.hold(self, now_s, since_s)
        return self._waits

    def release(self) -> None:
        """Let what has come be read: it need not wait any longer."""
        self._waits = False
        if self._items or self._token_ids:
            self._came.set()

    def _expire(self) -> None:
        self._close_tokens()
        self._items.append(DeadlineExceeded("the deadline has passed"))  # it has not ended there
        self._came.set()

    async def next(self, *, all_at_once: bool = False) -> Output:
        """Return the next output, or in one all that have come: the first one alone, for what it tells of
        when the first token came. Tokens that came with nothing else are in one. Raises what the request
        ended with.
        """
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
        """Ask for an early end; the last output is then finished with ABORTED."""
        self._client.send_abort(self._request_id)

    def close(self) -> None:
        """Forget the request; if it is still running, stop it."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended:
            self.abort()
        self._client.forget(self._request_id)
