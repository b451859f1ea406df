"""This module opens gRPC servers, accepts a method's calls several at a time, and ends the servers.

A server's life is: open_server (bound, SERVING) --> set_serving as often as needed --> serve_until_stopped
(NOT_SERVING, drained, then stopped with what is left of the grace).

grpc.aio's server requests one call of a method from its core, and the next one only some iterations of the
loop after that call has come. A busy loop has long iterations: of a thousand clients that call at once it
serves a few, and the others wait where neither metrics nor admission see them. Takers request further calls,
and each call is then handled as grpc.aio handles its own:

    core --> grpc.aio's loop: one call ---+
         --> taker: one call -------------+--> _handle_rpc: interceptors, handler, status
         --> taker: one call -------------+

These functions are not public. `inner_server` finds out whether the installed grpcio has them; without them
everything works, but calls are accepted one by one.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.net.bytes_in_flight import BytesInFlight
from services.net.channels import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES, TlsConfig, message_options
from services.net.guard import ErrorInterceptor, PeerDoor
from services.values.errors import ConfigError, DeadlineExceeded
from services.values.request import MAX_TIMEOUT_S

_NAMES = ("_MethodResolver", "_RequestCallError")
_ARGUMENTS = {
    "_handle_rpc": (
        "method_name",
        "method_resolver",
        "interceptors",
        "rpc_state",
        "loop",
        "concurrency_exceeded",
    ),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}

logger = logging.getLogger(__name__)


class CallTakers:
    def __init__(
        self,
        server: Any,
        method: str,
        handler: grpc.RpcMethodHandler,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        count: int,
    ) -> None:
        """Start `count` takers of `method` (/package.Service/Method), registered at an `inner_server`."""
        self._server = server
        self._method = method
        self._resolver = cygrpc._MethodResolver([], {method: handler})
        self._interceptors = tuple(interceptors)
        self._loop = asyncio.get_running_loop()
        self._calls = set[asyncio.Task[None]]()  # The loop itself keeps only weak references.
        self._takers = [self._loop.create_task(self._take()) for _ in range(count)]

    async def ended(self) -> None:
        await asyncio.gather(*self._takers)

    async def _take(self) -> None:
        name = self._method.encode()
        while True:
            try:
                # The call gets no name here: otherwise a waiting taker would keep the last call and its
                # messages.
                self._handle(await self._server._request_registered_call(name))
            except cygrpc._RequestCallError:
                if not self._server.is_running():
                    return
            except Exception:  # The other takers and grpc.aio's own loop still accept calls.
                logger.exception("call_taker_failed method=%s", self._method)
                return

    def _handle(self, state: Any) -> None:
        way = cygrpc._handle_rpc(self._method, self._resolver, self._interceptors, state, self._loop, False)
        task = self._loop.create_task(cygrpc._schedule_rpc_coro(way, state, self._loop, self._method))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


def inner_server(server: grpc.aio.Server) -> Any:
    """Return the inner server from which takers request calls, or None if this grpcio has a different one."""
    within = getattr(server, "_server", None)
    known = all(hasattr(cygrpc, name) for name in _NAMES)
    known = known and all(_arguments(name) == arguments for name, arguments in _ARGUMENTS.items())
    if not known or not hasattr(within, "_request_registered_call"):
        logger.warning("grpcio_unknown version=%s calls=one_by_one", grpc.__version__)
        return None
    return within


def _arguments(name: str) -> tuple[str, ...]:
    code = getattr(getattr(cygrpc, name, None), "__code__", None)
    return () if code is None else tuple(code.co_varnames[: code.co_argcount])


_MAX_PENDING_CALLS = 100_000
_TAKERS = 16  # Each method has this many takers; 8 and 64 work as well.
_SERVER_OPTIONS = [
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Beyond 1,000 calls that the event loop has not accepted yet, gRPC would refuse new ones as CANCELLED.
    # Calls have deadlines, and under load it is we who should refuse them, with our own error.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    # If another process still uses a port, that is an error, and we do not share the port.
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """These limits are for clients; most of them do not apply to peers, which are known.

    gRPC's core closes a connection above `max_connections` as soon as it is accepted: the client gets
    UNAVAILABLE and retries. A connection without a call for `idle_s` gets GOAWAY, and its client opens
    another one at its next call. A connection with a call stays open as long as the call, which has a
    deadline.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    in_flight: BytesInFlight | None = None
    max_connections: int = 0  # 0 means as many as the file descriptors allow.
    idle_s: float = math.inf

    def options(self) -> list[tuple[str, int]]:
        options = message_options(self.max_message_bytes)
        if self.max_connections:
            options.append(("grpc.max_allowed_incoming_connections", self.max_connections))
        if self.idle_s < math.inf:
            options.append(("grpc.max_connection_idle_ms", round(1e3 * self.idle_s)))
        return options


_NO_BOUNDS = ClientBounds()


def remaining_s(context: grpc.aio.ServicerContext) -> float | None:
    """Return the seconds left of the call's deadline, above 0 and at most MAX_TIMEOUT_S, or None without a
    deadline. Raises DeadlineExceeded once it has passed."""
    left: float | None = context.time_remaining()
    if left is not None and left <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return None if left is None else min(left, MAX_TIMEOUT_S)


class RpcServer:
    def __init__(self, server: grpc.aio.Server, port: int, checks: health.aio.HealthServicer) -> None:
        self.port = port
        self._server = server
        self._checks = checks
        self._takers: list[CallTakers] = []

    def __repr__(self) -> str:
        return f"RpcServer(port={self.port})"

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._checks.set("", status.SERVING if serving else status.NOT_SERVING)

    async def begin_shutdown(self) -> None:
        await self._checks.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.begin_shutdown()
        await self._server.stop(grace_s)
        for takers in self._takers:
            await takers.ended()

    def take_many(
        self,
        handlers: Mapping[str, grpc.RpcMethodHandler],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        if handlers and (within := inner_server(self._server)) is not None:
            self._takers += [
                CallTakers(within, method, handler, interceptors, _TAKERS)
                for method, handler in handlers.items()
            ]


async def open_server(
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    tls: TlsConfig | None = None,
    serving: bool = True,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    busy: Mapping[str, grpc.RpcMethodHandler] = MappingProxyType({}),
    bounds: ClientBounds = _NO_BOUNDS,
) -> RpcServer:
    """Bind HOST:PORT (port 0 chooses a free one), add health and reflection, and start.

    `register` adds the servicers; `service_names` are their full names, for reflection. Errors raised by
    `interceptors` or their handlers are answered like a servicer's. With `tls.peer_name` every call needs a
    certificate of that name. `busy` has the methods (/package.Service/Method) that many clients call at once,
    each with its registered handler. Raises ConfigError if the address or the TLS files cannot be used.
    """
    doors = [PeerDoor(tls.peer_name)] if tls is not None and tls.peer_name else []
    guard = ErrorInterceptor(keeps=not interceptors, in_flight=bounds.in_flight)
    options = [*_SERVER_OPTIONS, *bounds.options()]
    around = [*doors, guard, *interceptors]
    server = grpc.aio.server(interceptors=around, options=options)
    register(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _bind(server, listen, tls)
    opened = RpcServer(server, port, checks)
    await opened.set_serving(serving)
    await server.start()
    opened.take_many(busy, around)
    return opened


def _bind(server: grpc.aio.Server, listen: str, tls: TlsConfig | None) -> int:
    credentials = None if tls is None else tls.for_server()
    try:
        if credentials is None:
            return int(server.add_insecure_port(listen))
        return int(server.add_secure_port(listen, credentials))
    except RuntimeError as error:
        # gRPC has one message for an address in use and for a key pair that it, unlike OpenSSL, cannot use.
        unless = "" if credentials is None else ", or cannot use the TLS certificate and key"
        raise ConfigError(f"cannot listen on {listen}{unless}: {error}") from error


_LAST_WORDS_S = 1.0


async def serve_until_stopped(
    server: RpcServer,
    stopping: asyncio.Event,
    grace_s: float,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until `stopping` is set, then end within about `grace_s`.

    Health becomes NOT_SERVING, and `drain` (accept no requests, return when none runs) gets the grace. After
    that only streams are open that peers hold as long as we live: they get a moment to receive the last
    messages. Calls that still run when the time is over are cancelled.
    """
    await stopping.wait()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    await server.begin_shutdown()
    if drain is not None:
        try:
            async with asyncio.timeout_at(deadline):
                await drain()
            deadline = min(deadline, loop.time() + _LAST_WORDS_S)
        except TimeoutError:
            logger.warning("drain_timed_out grace_s=%g", grace_s)
    await server.stop(max(0.0, deadline - loop.time()))
