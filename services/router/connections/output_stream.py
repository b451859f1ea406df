"""An output stream keeps what a decode rank reports of one request until somebody reads it.

    put_token, put_token ...  --> tokens --+
    put(first), put(last), put(error) -----+--> next(), which takes along what has come meanwhile

Whoever reads is woken once for all that has come; while the router is short of time, a moment later
(coalescing.py).
"""

import asyncio
import math
from collections import deque
from typing import Protocol

from services.router.connections.coalescing import Coalescing
from services.values.errors import DeadlineExceeded, IsthmusError
from services.values.request import Output


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
