"""Server-sent events, and an answer on its way to a client that may leave, or stop reading."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.dialects.answer import Event, json_text
from services.values.errors import Aborted, DeadlineExceeded

_T = TypeVar("_T")

# Proxies take a stream in which nothing comes for a minute to be dead (nginx's proxy_read_timeout).
SILENCE_S = 15.0
COMMENT = b": at it\n\n"  # which readers of events leave aside (WHATWG HTML, 9.2.6)
# Next line, line separator, paragraph separator: JSON leaves them as they are, and a client that splits a
# stream as Python's splitlines does (httpx) would cut an event there.
_LINE_SEPARATORS = "\x85\u2028\u2029"


def sse(event: Event) -> bytes:
    """As it goes over the wire (WHATWG HTML, 9.2)."""
    text = event.data
    if not isinstance(text, str):
        text = json_text(text)
    for separator in _LINE_SEPARATORS:
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    name = f"event: {event.name}\n" if event.name else ""
    return f"{name}data: {text}\n\n".encode()


class EventStream(Response):
    """Sends server-sent events as they come, until the client leaves or the time is over: it may have stopped
    reading. Closes `events`. Without a limit the connection alone sees to that."""

    def __init__(self, events: AsyncGenerator[bytes, None], time_limit_s: float | None) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._time_limit_s = time_limit_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._time_limit_s):
                await until_disconnect(receive, self._send_events(send))
        except ClientLeft:
            return  # nobody to answer, and a stream that has begun cannot change its status
        except TimeoutError:
            if not self._started:
                raise DeadlineExceeded("the deadline has passed") from None

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            event = await anext(events)  # what it raises can still have a status of its own
            self._started = True
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": event, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ClientLeft(Aborted):
    """Nobody is there to be answered."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; when the client leaves first, `work` is cancelled and has ended.

    Raises:
        ClientLeft: nothing can be sent any more.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
