"""An HTTP connection is uvicorn's own, with limits on its times and on the number of connections.

    connected -> idle --first byte--> head ----> body ----> answered -> idle ...
                 keep-alive           header_s   body_s                 keep-alive
                 closed               408        408                    closed

A connection is also closed when its client reads nothing of an answer for the keep-alive time.

A connection above `max_connections` gets 503 for its request, unless others have closed by then; one far
above gets 503 at once. So clients never use up the file descriptors that the ranks' streams need.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import h11
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from services.net.certificates import Pem
from services.net.channels import TlsConfig
from services.router.dialects.http_errors import ConnectionsFull, TooSlow, error_json, status_of
from services.router.http.middleware import answer_error, headers_of
from services.values.errors import InvalidRequest, IsthmusError


class HttpTls(ssl.SSLContext):
    """asyncio gets this as a listener's context; each new connection uses the certificate files as they are
    then.

    Loading files into an existing context would keep its old authorities, so a changed file makes a new
    context.
    """

    _of_files: Callable[[], ssl.SSLContext]

    def __new__(cls, tls: TlsConfig) -> Self:
        """Raises ConfigError when the files cannot be used."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._of_files = _contexts(tls)
        made._of_files()
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._of_files().wrap_bio(*args, **kwargs)


def _contexts(tls: TlsConfig) -> Callable[[], ssl.SSLContext]:
    held: tuple[Pem, ssl.SSLContext] | None = None

    def current() -> ssl.SSLContext:
        nonlocal held
        pem = tls.certificates.look()
        if held is None or held[0] is not pem:
            held = pem, pem.server_context(tls.mutual)
        return held[1]

    return current


ENDS = ("full", "slow_head", "slow_body", "unread")  # These are the reasons for closing a connection.
APIS = ("chat", "completions", "responses", "messages", "sglang")
_RETRY_AFTER_S = 1.0


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge(
            "isthmus_http_connections", "HTTP connections, idle ones too.", registry=registry
        )
        self._ended_connections = Counter(
            "isthmus_http_connections_ended",
            "HTTP connections that the router closed: full, above their limit; slow_head and slow_body, for "
            "a request that arrived too slowly; unread, for an answer that nobody read.",
            ["reason"],
            registry=registry,
        )
        for reason in ENDS:
            self._ended_connections.labels(reason)

        self._calls = Counter(
            "isthmus_http_calls",
            "Calls for a generation over HTTP, by API: chat, completions, responses, messages (Anthropic's), "
            "sglang (/generate).",
            ["api"],
            registry=registry,
        )
        for api in APIS:
            self._calls.labels(api)

    def count_call(self, api: str) -> None:
        self._calls.labels(api).inc()

    def count_end(self, reason: str) -> None:
        self._ended_connections.labels(reason).inc()


@dataclass(frozen=True, slots=True)
class HttpBounds:
    header_s: float  # This is the time from a request's first byte to the end of its head.
    body_s: float  # This is the time from the end of the head to the end of the body.
    max_connections: int
    surplus: int  # This many connections above the limit are accepted in order to refuse them.


class BoundedConnection(H11Protocol):
    """`report` receives the reason for closing the connection, which is one of ENDS."""

    def __init__(self, bounds: HttpBounds, report: Callable[[str], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._bounds = bounds
        self._report = report
        self._is_surplus = False
        self._reading: tuple[str, object] | None = None  # These are the part being read and its request.
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_above = len(self.connections) - self._bounds.max_connections
        if num_above > self._bounds.surplus:
            self._end("full", _full())
            return
        self._is_surplus = num_above > 0
        idle_s = self._bounds.header_s if self._is_surplus else self.timeout_keep_alive
        self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(None)
        self._stop_expecting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        self._is_surplus = self._is_surplus and len(self.connections) > self._bounds.max_connections
        self.app = self._refuse if self._is_surplus else self.config.loaded_app
        super().handle_events()
        self._watch(None if self.transport.is_closing() else self._what_is_read())

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()  # The client may still read the rest of its answer.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_expecting()

    def send_400_response(self, msg: str) -> None:
        self._end("", InvalidRequest(msg))

    def _what_is_read(self) -> tuple[str, object] | None:
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        has_begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        return ("head", self.cycle) if has_begun else None

    def _watch(self, reading: tuple[str, object] | None) -> None:
        if reading == self._reading:
            return
        self._reading = reading
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if reading is not None:
            limit_s = self._bounds.header_s if reading[0] == "head" else self._bounds.body_s
            self._timer = self.loop.call_later(limit_s, self._too_slow, reading[0], limit_s)

    def _too_slow(self, part: str, limit_s: float) -> None:
        self._end(f"slow_{part}", TooSlow(f"the request's {part} did not come within {limit_s:g} s"))

    def _expect_reading(self) -> None:
        """Start the timer for a client that reads nothing. It may take the keep-alive time; a closing
        transport waits for the client, too."""
        self._stop_expecting()
        if num_bytes := self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(self.timeout_keep_alive, self._check_read, num_bytes)

    def _check_read(self, num_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_bytes:
            self._expect_reading()
        else:
            self._report("unread")
            self.transport.abort()

    def _stop_expecting(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _end(self, reason: str, error: IsthmusError) -> None:
        if reason:
            self._report(reason)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(error)
        self.transport.close()

    def _write(self, error: IsthmusError) -> None:
        body, status = json.dumps(error_json(error)).encode(), status_of(error)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *headers_of(error).items(),
        ]
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._report("full")
        answer = await answer_error(Request(scope), _full())
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)


def _full() -> ConnectionsFull:
    return ConnectionsFull("this server has all the connections that it can have", _RETRY_AFTER_S)
