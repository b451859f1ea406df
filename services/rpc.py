"""gRPC plumbing on grpc.aio: errors to status and back, channels, servers, deadlines.

    handler raises NoCapacity --> interceptor: RESOURCE_EXHAUSTED, the sentence, isthmus-error: NoCapacity
                                    ~~~ the wire ~~~
    caller inside `renaming()` <-- NoCapacity again; a failure of gRPC's own is named by its code

One server's life: open_server (bound, SERVING) --> set_serving as often as needed --> serve_until_stopped
(NOT_SERVING, drained, then stopped with what is left of the grace).
"""

import asyncio
import contextlib
import inspect
import logging
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.certificates import Certificates, Pem, certificates_of
from services.errors import (
    Aborted,
    AlreadyRunning,
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    KvCorrupt,
    NoCapacity,
    NotFound,
    PeerFailed,
    ProtocolError,
    StaleGeneration,
    Unauthenticated,
    Unavailable,
    root_cause,
)
from services.reloading_channel import ReloadingChannel
from services.request import MAX_TIMEOUT_S
from services.wire.isthmus.v1 import decode_pb2

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
ERROR_KEY = "isthmus-error"  # trailing metadata: the name of the class that was raised
_PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC's own: its clients that retry by themselves heed it
# gRPC drops a status whose metadata passes 8 KiB; a character may take three bytes there.
_MAX_DETAILS_BYTES = 2000
_INTERNAL = "internal error; the server's log has it"

_STATUS: dict[type[IsthmusError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ContextExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyRunning: grpc.StatusCode.ALREADY_EXISTS,
    NoCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerFailed: grpc.StatusCode.UNAVAILABLE,
    KvCorrupt: grpc.StatusCode.UNAVAILABLE,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Aborted: grpc.StatusCode.CANCELLED,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}
_BY_NAME: dict[str, type[IsthmusError]] = {error.__name__: error for error in _STATUS}
# For a status that came without the name: the peer's gRPC library made it, or it is no peer of ours.
_BY_STATUS: dict[grpc.StatusCode, type[IsthmusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyRunning,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoCapacity,
    grpc.StatusCode.FAILED_PRECONDITION: StaleGeneration,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status an error travels as; INTERNAL for one that we did not raise on purpose."""
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return grpc.StatusCode.INTERNAL


def error_from(error: grpc.aio.AioRpcError) -> IsthmusError:
    """The error that the peer raised, or the one that says what to do about a failure of gRPC's."""
    details = error.details() or error.code().name
    name = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
    if name in _BY_NAME:
        return _BY_NAME[name](details)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidRequest(f"the message is too large: {details}")
    return _BY_STATUS.get(error.code(), PeerFailed)(details)


def heed_cancellation() -> None:
    """To be called when a call has failed. Raises CancelledError if this task was cancelled meanwhile.

    A cancellation that meets the failure of a call is lost in grpc.aio, which waits for tasks of its own that
    swallow it; whoever then tries again would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextlib.contextmanager
def renaming() -> Iterator[None]:
    """Around a call to a peer: its AioRpcError becomes our error."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        heed_cancellation()
        raise error_from(error) from error


def error_from_request(pb: decode_pb2.RequestError) -> IsthmusError:
    """What a RequestError on the Attach stream says.

    PeerFailed: another prefill rank may do. Unavailable: this decode rank failed, use another.
    """
    if pb.peer_failed:
        return PeerFailed(pb.message)
    code = _CODES.get(pb.code, grpc.StatusCode.UNKNOWN)
    return _BY_STATUS.get(code, Unavailable)(pb.message)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers what a handler raises: our errors by the table, anything else as INTERNAL, logged."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        return _guarded(handler, handler_call_details.method)


_Receive = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


def _guarded(handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
    """Always as a handler of many messages: the one of others is read within the guard. grpc.aio's own
    reading waits for ever when a client ends its call without it, and answers UNKNOWN to bytes that are no
    message. On the wire there is no difference."""
    answers = "stream" if handler.response_streaming else "unary"
    asks = "stream" if handler.request_streaming else "unary"
    behavior = getattr(handler, f"{asks}_{answers}")
    receive: _Receive = _as_it_comes
    parse = handler.request_deserializer
    if not handler.request_streaming:
        receive, parse = _only_message(parse), None
    guard = _guarded_generator if inspect.isasyncgenfunction(behavior) else _guarded_coroutine
    make_handler = getattr(grpc, f"stream_{answers}_rpc_method_handler")
    return make_handler(guard(behavior, receive, method), parse, handler.response_serializer)


async def _as_it_comes(messages: Any, context: grpc.aio.ServicerContext) -> Any:
    return messages


def _only_message(parse: Callable[[bytes], Any]) -> _Receive:
    """Raises InvalidRequest when there is none, or one that cannot be read."""

    async def receive(messages: Any, context: grpc.aio.ServicerContext) -> Any:
        raw = await context.read()
        if raw is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a message")
        try:
            return parse(raw)
        except DecodeError as error:  # text that is no UTF-8, for one
            raise InvalidRequest(f"the message cannot be read: {error}") from error

    return receive


def _guarded_coroutine(
    behavior: Callable[..., Awaitable[Any]], receive: _Receive, method: str
) -> Callable[..., Awaitable[Any]]:
    async def call(messages: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(await receive(messages, context), context)
        except Exception as error:
            return await _answer(context, method, error)

    return call


def _guarded_generator(
    behavior: Callable[..., AsyncGenerator[Any, None]], receive: _Receive, method: str
) -> Callable[..., AsyncGenerator[Any, None]]:
    async def stream(messages: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            request = await receive(messages, context)
            async with contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _answer(context, method, error)

    return stream


async def _answer(context: grpc.aio.ServicerContext, method: str, error: Exception) -> NoReturn:
    cause = root_cause(error)  # a handler may run a TaskGroup
    if isinstance(cause, grpc.aio.BaseError):  # the handler aborted by itself, or the call is gone
        raise cause
    if isinstance(cause, TimeoutError):  # of asyncio.timeout(remaining_s(context))
        cause = DeadlineExceeded("the deadline has passed")
    if not isinstance(cause, IsthmusError):
        logger.error("handler_failed method=%s", method, exc_info=error)
        await _abort(context, grpc.StatusCode.INTERNAL, _INTERNAL)
    details = str(cause).encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    metadata = [(ERROR_KEY, type(cause).__name__)]
    if isinstance(cause, NoCapacity) and cause.retry_after_s is not None:
        metadata.append((_PUSHBACK_KEY, str(round(1e3 * cause.retry_after_s))))
    await _abort(context, status_of(cause), details, tuple(metadata))


async def _abort(
    context: grpc.aio.ServicerContext,
    code: grpc.StatusCode,
    details: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError as error:
        # The call has ended, by its deadline for one: nobody hears this. grpc.aio would log it as our bug.
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")  # grpc.aio has no types that would say so


def _is_of_a_living_call(record: logging.LogRecord) -> bool:
    """False of what grpc.aio logs as a servicer's bug: the last word of a call that ended meanwhile, by its
    deadline or its client, which the core could not send."""
    return not (record.exc_info and isinstance(record.exc_info[1], cygrpc.ExecuteBatchError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_a_living_call)


def remaining_s(context: grpc.aio.ServicerContext) -> float | None:
    """Seconds left of the call's deadline, above 0 and at most MAX_TIMEOUT_S; None when the caller set none.

    Raises:
        DeadlineExceeded: nothing is left.
    """
    left: float | None = context.time_remaining()
    if left is not None and left <= 0:
        raise DeadlineExceeded("the deadline has passed")
    return None if left is None else min(left, MAX_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files. `mutual`: each side shows its certificate and checks the other's against `ca`.

    `server_name` is what a server's certificate must carry; "": the host in the endpoint. Ranks that are
    reached at addresses which no certificate can foresee (a pod's) share a name.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    mutual: bool = False
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key, or neither")
        if self.mutual and (self.ca is None or self.cert is None):
            raise ConfigError("mutual TLS needs a CA, a certificate and its key")

    @property
    def certificates(self) -> Certificates:
        """What the files hold, now and later. Raises ConfigError when they cannot be used now."""
        return certificates_of(self.ca, self.cert, self.key)

    def for_server(self) -> grpc.ServerCredentials:
        """Each new connection is under the files as they are then. Raises ConfigError."""
        if self.cert is None:
            raise ConfigError("a TLS server needs a certificate and its key")
        certificates = self.certificates
        shown = certificates.look()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by a thread of gRPC's at each handshake; None: it goes on with what it has."""
            nonlocal shown
            if (pem := certificates.look()) is shown:
                return None
            shown = pem
            return self._server_configuration(pem)

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(shown), changed, require_client_authentication=self.mutual
        )

    def _server_configuration(self, pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(pem.key, pem.cert)], pem.ca if self.mutual else None
        )

    def for_channel(self, pem: Pem) -> grpc.ChannelCredentials:
        """Without a CA the system's own are trusted."""
        key, cert = (pem.key, pem.cert) if self.mutual else (None, None)
        return grpc.ssl_channel_credentials(pem.ca, key, cert)

    def open_channel(self, endpoint: str, options: Sequence[tuple[str, int | str]]) -> grpc.aio.Channel:
        """One that connects under the files as they are whenever it does. Raises ConfigError."""
        if self.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]

        def connect(pem: Pem) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(endpoint, self.for_channel(pem), options=options)

        return ReloadingChannel(self.certificates, connect)


_MESSAGE_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
# A peer whose host died sends no FIN: pings find out within keepalive time + timeout. A process that was
# killed is known at once without them. So the timeout is what a living peer may be kept from answering:
# on a crowded host an ordinary process waits for its turn for more than 5 s.
_PING_TIMEOUT_MS = 20_000
_KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    # It never comes into effect; this is what ends the wait for a ping's answer (grpc/grpc#39239).
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    *_MESSAGE_OPTIONS,
    *_KEEPALIVE_OPTIONS,
    # A restarted rank is found again within this, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A channel opened anew tries anew: it must not wait out the backoff of one that failed before.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are the router's business: it knows what was already yielded.
    ("grpc.enable_retries", 0),
]
_MAX_PENDING_CALLS = 100_000
_SERVER_OPTIONS = [
    *_MESSAGE_OPTIONS,
    *_KEEPALIVE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Past 1,000 calls that the event loop has not taken up yet gRPC turns new ones away as CANCELLED.
    # Calls have deadlines, and whoever is refused for load is to be told so by us.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    # A port that another process still holds is an error, not a port shared with it.
    ("grpc.so_reuseport", 0),
]


def open_channel(endpoint: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """A channel to HOST:PORT; connects at the first call. Raises ConfigError when TLS files are bad."""
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    return tls.open_channel(endpoint, _CHANNEL_OPTIONS)


class RpcServer:
    """A running server with its health service; made by `open_server`."""

    def __init__(self, server: grpc.aio.Server, port: int, checks: health.aio.HealthServicer) -> None:
        self.port = port
        self._server = server
        self._checks = checks

    def __repr__(self) -> str:
        return f"RpcServer(port={self.port})"

    async def set_serving(self, serving: bool) -> None:
        """What health checks of the whole server (service "") answer from now on."""
        status = health_pb2.HealthCheckResponse
        await self._checks.set("", status.SERVING if serving else status.NOT_SERVING)

    async def begin_shutdown(self) -> None:
        """NOT_SERVING for good; calls are still taken."""
        await self._checks.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no new call; cancel those that still run after `grace_s`; return when all have ended."""
        await self.begin_shutdown()
        await self._server.stop(grace_s)


async def open_server(
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    tls: TlsConfig | None = None,
    serving: bool = True,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> RpcServer:
    """Bind HOST:PORT (port 0: a free one), add health and reflection, and start.

    `register` adds the servicers; `service_names` are their full names, for reflection. What `interceptors`
    or their handlers raise is answered as what a servicer raises.

    Raises:
        ConfigError: the address cannot be bound, or the TLS files cannot be used.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), *interceptors], options=_SERVER_OPTIONS)
    register(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _bind(server, listen, tls)
    opened = RpcServer(server, port, checks)
    await opened.set_serving(serving)
    await server.start()
    return opened


def _bind(server: grpc.aio.Server, listen: str, tls: TlsConfig | None) -> int:
    credentials = None if tls is None else tls.for_server()
    try:
        if credentials is None:
            return int(server.add_insecure_port(listen))
        return int(server.add_secure_port(listen, credentials))
    except RuntimeError as error:
        # gRPC has one sentence for an address in use and for a pair that it, unlike OpenSSL, cannot use.
        unless = "" if credentials is None else ", or cannot use the TLS certificate and key"
        raise ConfigError(f"cannot listen on {listen}{unless}: {error}") from error


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, from now to the end of the running loop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


_LAST_WORDS_S = 1.0


async def serve_until_stopped(
    server: RpcServer,
    stopping: asyncio.Event,
    grace_s: float,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until `stopping` is set, then end in order, within about `grace_s`.

    Health says NOT_SERVING; `drain` (stop taking requests, return when none runs) gets the grace. What
    is still open then are streams that peers hold as long as we live: they get a moment to take the last
    words. Calls that still run when the time is over are cancelled.
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
