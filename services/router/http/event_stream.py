"""Server-sent events are sent to a client that may leave, or stop reading."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.dialects.dialect import Event, json_text
from services.values.errors import Aborted, DeadlineExceeded, IsthmusError

_T = TypeVar("_T")

# Proxies take a stream in which nothing comes for a minute to be dead (nginx's proxy_read_timeout).
SILENCE_S = 15.0
HEADERS_S = 0.5  # A client that waits for headers has them after this.
COMMENT = b": at it\n\n"  # Readers of events leave it aside (WHATWG HTML, 9.2.6).
# JSON leaves a next line, a line separator and a paragraph separator as they are, and a client that splits a
# stream as Python's splitlines does (httpx) would cut an event there.
_LINE_SEPARATORS = "\x85\u2028\u2029"


def sse(event: Event) -> bytes:
    text = event.data
    if not isinstance(text, str):
        text = json_text(text)
    for separator in _LINE_SEPARATORS:
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    name = f"event: {event.name}\n" if event.name else ""
    return f"{name}data: {text}\n\n".encode()


class EventStream(Response):
    """Sends server-sent events as they come, until the client leaves or the time is over: it may have stopped
    reading. Closes `events`.

    The status is decided by the first event, or by what is raised before it. Where neither comes within
    `HEADERS_S` the headers are sent all the same, and what fails after that is reported by an event. Whenever
    nothing has been sent for `SILENCE_S`, `ping` is.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        time_limit_s: float | None = None,
        failure: Callable[[Exception], Iterable[bytes]] | None = None,
        ping: bytes = COMMENT,
    ) -> None:
        """`failure` makes the events that end a stream which has begun; without it an error cuts the
        stream off. Without a limit the connection alone sees to a client that does not read."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._time_limit_s = time_limit_s
        self._failure = failure
        self._ping = ping
        self._has_begun = False
        self._beginning = asyncio.Lock()
        self._is_sending = False
        self._said_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._said_s = time.monotonic()
        try:
            async with asyncio.timeout(self._time_limit_s):
                await until_disconnect(receive, self._send_events(send), partial(self._keep_alive, send))
        except ClientLeft:
            return  # There is nobody to answer, and a stream that has begun cannot change its status.
        except TimeoutError:
            if not self._has_begun:
                raise DeadlineExceeded("the deadline has passed") from None

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await self._say(event, send)
            except Exception as error:
                if not self._has_begun or self._failure is None:
                    raise
                for event in self._failure(error):
                    await self._say(event, send)
                if not isinstance(error, IsthmusError):
                    raise
        await self._begin(send)
        self._is_sending = True  # No ping may come behind the last message.
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, send: Send) -> None:
        async with self._beginning:
            if not self._has_begun:
                await send(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
                self._has_begun = True

    async def _say(self, event: bytes, send: Send) -> None:
        if not self._has_begun:
            await self._begin(send)
        self._is_sending = True
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._is_sending = False
        self._said_s = time.monotonic()

    async def _keep_alive(self, send: Send) -> float:
        """Send what is due by now, and return the seconds until something may be due again."""
        if not self._has_begun:
            left_s = self._said_s + HEADERS_S - time.monotonic()
            if left_s > 0:
                return left_s
            await self._begin(send)
        left_s = self._said_s + SILENCE_S - time.monotonic()
        if left_s > 0:
            return left_s
        if not self._is_sending:  # Otherwise the client does not read what there is.
            await self._say(self._ping, send)
        return SILENCE_S


class ClientLeft(Aborted):
    """Nobody is there to be answered."""


async def until_disconnect(
    receive: Receive,
    work: Coroutine[Any, Any, _T],
    keep_alive: Callable[[], Awaitable[float | None]] | None = None,
) -> _T:
    """Return what `work` returns. When the client leaves first, `work` is cancelled and has ended.

    `keep_alive` is called meanwhile: at first, and whenever the seconds that it returned are over.

    Raises:
        ClientLeft: nothing can be sent any more.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        while not (working.done() or leaving.done()):
            wait_s = None if keep_alive is None else await keep_alive()
            await asyncio.wait((working, leaving), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()  # It raises what `receive` did.
        raise ClientLeft("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
