"""This module sends server-sent events to a client that may leave or stop reading."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.dialects.dialect import Event, json_text
from services.values.errors import Aborted, DeadlineExceeded, IsthmusError

_T = TypeVar("_T")

# Proxies close a stream that is silent for a minute (nginx's proxy_read_timeout).
SILENCE_S = 15.0
HEADERS_S = 0.5  # The headers are sent after this time at the latest.
COMMENT = b": at it\n\n"  # Clients ignore a comment (WHATWG HTML, 9.2.6).
# JSON does not escape these (next line, line separator, paragraph separator), and a client that splits a
# stream with Python's splitlines (httpx) would cut an event there.
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
    """This response sends events as they come, until the client leaves or the time limit ends, as the client
    may have stopped reading. It closes `events`.

    The first event, or an error before it, decides the status. Where neither comes within `HEADERS_S`, the
    headers are sent anyway, and a later error is an event. `ping` is sent after each silence of `SILENCE_S`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        time_limit_s: float | None = None,
        failure: Callable[[Exception], Iterable[bytes]] | None = None,
        ping: bytes = COMMENT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`failure` makes the events that end a started stream; without it an error cuts the stream off.
        Without a time limit only the connection's own timer ends a stream that the client does not read."""
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**own, **(headers or {})}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._time_limit_s = time_limit_s
        self._failure = failure
        self._ping = ping
        self._has_begun = False
        self._beginning = asyncio.Lock()
        self._is_sending = False
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._time_limit_s):
                await until_disconnect(receive, self._send_events(send), partial(self._keep_alive, send))
        except ClientLeft:
            return  # Nobody can be answered, and a started stream cannot change its status.
        except TimeoutError:
            if not self._has_begun:
                raise DeadlineExceeded("the deadline has passed") from None

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await self._send_event(event, send)
            except Exception as error:
                if not self._has_begun or self._failure is None:
                    raise
                for event in self._failure(error):
                    await self._send_event(event, send)
                if not isinstance(error, IsthmusError):
                    raise
        await self._begin(send)
        self._is_sending = True  # No ping may follow the last message.
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, send: Send) -> None:
        async with self._beginning:
            if not self._has_begun:
                await send(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
                self._has_begun = True

    async def _send_event(self, event: bytes, send: Send) -> None:
        if not self._has_begun:
            await self._begin(send)
        self._is_sending = True
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._is_sending = False
        self._sent_s = time.monotonic()

    async def _keep_alive(self, send: Send) -> float:
        if not self._has_begun:
            left_s = self._sent_s + HEADERS_S - time.monotonic()
            if left_s > 0:
                return left_s
            await self._begin(send)
        left_s = self._sent_s + SILENCE_S - time.monotonic()
        if left_s > 0:
            return left_s
        if not self._is_sending:  # Otherwise the client is not reading.
            await self._send_event(self._ping, send)
        return SILENCE_S


class ClientLeft(Aborted):
    pass


async def until_disconnect(
    receive: Receive,
    work: Coroutine[Any, Any, _T],
    keep_alive: Callable[[], Awaitable[float | None]] | None = None,
) -> _T:
    """Return the result of `work`, which is cancelled and awaited when the client leaves first.

    `keep_alive` is called at the start and then whenever the seconds that it returned have passed.

    Raises ClientLeft.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        while not (working.done() or leaving.done()):
            wait_s = None if keep_alive is None else await keep_alive()
            await asyncio.wait((working, leaving), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()  # This raises the error of `receive`, if there was one.
        raise ClientLeft("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
