"""A connection sends calls to a cluster of etcd members.

There is one channel per endpoint, so that host names, addresses and TLS names all fail over in the same way:

    current endpoint --ready?--> log in once --> call --ok------------------------------> answer
          ^    no                                  |--transient--> next endpoint, wait --+
          +----------- next endpoint <-------------+                                     |
          +-------------------------- again, if idempotent and there is time ------------+
                                                   |--token refused--> new token, again

A call is sent only on a connected channel. A failure before that means that it was never sent, so it is tried
at another endpoint even if it is not idempotent.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import grpc

from services.etcd.etcd_errors import Backoff, is_auth_off, is_token_refused, is_transient, rename
from services.net import grpc_errors
from services.net.channels import TlsConfig
from services.values.errors import ConfigError, IsthmusError, Unavailable
from services.wire.etcd import etcd_pb2


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """`endpoints` are HOST:PORT; a scheme in front is accepted if it agrees with `tls`. Raises ConfigError if
    the settings contradict each other."""

    endpoints: tuple[str, ...]
    tls: TlsConfig | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = 5.0  # This limits one call with all its attempts.
    attempt_timeout_s: float = 2.0  # This limits one attempt at one endpoint.
    connect_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("at least one etcd endpoint is needed")
        targets = tuple(_target(endpoint, self.tls is not None) for endpoint in self.endpoints)
        object.__setattr__(self, "endpoints", targets)


def _target(endpoint: str, tls: bool) -> str:
    scheme, separator, rest = endpoint.strip().rpartition("://")
    if separator and scheme != ("https" if tls else "http"):
        wanted = "without a CA file for TLS" if not tls else "with a CA file for TLS"
        raise ConfigError(f"the etcd endpoint {endpoint!r} does not go {wanted}")
    host, _, port = rest.rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"an etcd endpoint is HOST:PORT, got {endpoint!r}")
    return f"{host}:{port}"


logger = logging.getLogger(__name__)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# The arguments are the method, the seconds, and whether it failed.
Observe = Callable[[str, float, bool], None]
_Metadata = tuple[tuple[str, str], ...]

# A member cut off from the majority refuses at once instead of hanging (etcd rpctypes/metadatafields.go).
_HAS_LEADER: _Metadata = (("hasleader", "true"),)
_MAX_RESPONSE_BYTES = 128 << 20
_MAX_AHEAD = 8  # At most this many messages wait for a stream's reader; then HTTP/2 stops the sender.
_AUTH_OFF = ""  # This replaces the token when etcd has no authentication.
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # net/channels.py explains this.
    ("grpc.max_receive_message_length", _MAX_RESPONSE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # We must not share the reconnect timer of another client in this process.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Method(Generic[_Request, _Response]):
    path: str
    request_type: type[_Request]
    response_type: type[_Response]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def serializers(self) -> dict[str, Any]:
        return {
            "request_serializer": self.request_type.SerializeToString,  # type: ignore[attr-defined]
            "response_deserializer": self.response_type.FromString,  # type: ignore[attr-defined]
        }


_AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", etcd_pb2.AuthenticateRequest, etcd_pb2.AuthenticateResponse
)


def unobserved(method: str, took_s: float, failed: bool) -> None:
    pass


class EtcdStream(Generic[_Request, _Response]):
    """This is a bidirectional stream, which any error ends. Its user must always close it.

    One task receives for the whole stream, a little ahead of the reader: a watch delivers thousands of
    messages a second, and a task, a wait and a timer for each of them would cost as much as receiving it.
    """

    def __init__(self, call: Any, failed: Callable[[BaseException], IsthmusError]) -> None:
        self._call = call
        self._failed = failed
        self._received: deque[_Response] = deque()
        self._room = asyncio.Event()
        self._news: asyncio.Future[None] | None = None  # The reader waits for this.
        self._receiving = asyncio.create_task(self._receive())
        self._receiving.add_done_callback(self._ended)

    async def write(self, request: _Request) -> None:
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._failed(error) from error

    async def read(self, timeout_s: float) -> _Response | None:
        """Return the next message, or None if none came in time but the stream still works. Raises
        Unavailable if the stream has ended, or the error that `rename` makes of its status."""
        if not self._received and not self._receiving.done():
            await self._wait_for_news(timeout_s)
        if self._received:
            self._room.set()
            return self._received.popleft()
        if self._receiving.done():
            self._raise_end()
        return None

    def silent(self, error: IsthmusError) -> IsthmusError:
        """Leave the endpoint, which did not send what it must send; return `error` for the caller to raise.

        A silent member looks connected until gRPC's own pings have failed.
        """
        return self._failed(error)

    def close(self) -> None:
        self._call.cancel()
        self._receiving.cancel()

    async def _wait_for_news(self, timeout_s: float) -> None:
        # Cancelling a read would cancel the whole RPC, so we only stop waiting for it.
        loop = asyncio.get_running_loop()
        self._news = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake_reader)
        try:
            await self._news
        finally:
            timer.cancel()
            self._news = None

    def _wake_reader(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _receive(self) -> None:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self._received.append(message)
            self._wake_reader()
            while len(self._received) >= _MAX_AHEAD:
                self._room.clear()
                await self._room.wait()

    def _ended(self, receiving: asyncio.Task[None]) -> None:
        if not receiving.cancelled():
            receiving.exception()  # The error counts as seen: the next read raises it, if there is one.
        self._wake_reader()

    def _raise_end(self) -> NoReturn:
        try:
            self._receiving.result()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise self._failed(error) from error
        raise self._failed(Unavailable("etcd ended the stream"))


class EtcdConnection:
    """A connection knows which endpoint answers and which token is valid. One event loop owns it.

    `observe` is called after each attempt at a unary call.
    """

    def __init__(
        self,
        settings: EtcdSettings,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        observe: Observe = unobserved,
    ) -> None:
        self._settings = settings
        self._rng = rng
        self._clock = clock
        self._observe = observe
        self._channels = [_open_channel(endpoint, settings.tls) for endpoint in settings.endpoints]
        # Clients choose members at random, and each stays with its member while that works.
        self._current = rng.randrange(len(self._channels))
        self._token: str | None = None  # None means that we must log in first.
        self._login = asyncio.Lock()

    @property
    def num_endpoints(self) -> int:
        return len(self._channels)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def unary(
        self, method: Method[_Request, _Response], request: _Request, *, idempotent: bool = True
    ) -> _Response:
        """Call until it succeeds, fails for good, or `settings.timeout_s` is over.

        Raises:
            Unavailable: No answer came; a call that is not idempotent may have been executed.
            EtcdNoSpace, EtcdCompacted, LeaseNotFound, ConfigError, ProtocolError: See `rename`.
        """
        deadline = self._clock() + self._settings.timeout_s
        backoff = Backoff(self._rng)
        while True:
            channel, metadata = await self._prepare(deadline)
            try:
                return await self._attempt(channel, method, request, metadata, deadline)
            except grpc.aio.AioRpcError as error:
                grpc_errors.heed_cancellation()
                failure = self._note_failure(channel, metadata, error)
                refused = isinstance(failure, Unavailable) and is_token_refused(error)
                retry = refused or (idempotent and is_transient(error))
                wait_s = backoff.next_s()
                if not retry or self._clock() + wait_s >= deadline:
                    raise failure from error
            await asyncio.sleep(wait_s)

    async def open_stream(self, method: Method[_Request, _Response]) -> EtcdStream[_Request, _Response]:
        channel, metadata = await self._prepare(self._clock() + self._settings.timeout_s)
        call = channel.stream_stream(method.path, **method.serializers())(metadata=metadata)
        return EtcdStream(call, lambda error: self._note_failure(channel, metadata, error))

    def distrust_token(self) -> None:
        """Log in again before the next call. Watches need this: a message refuses them, not a status."""
        self._token = None

    async def _prepare(self, deadline: float) -> tuple[grpc.aio.Channel, _Metadata]:
        backoff = Backoff(self._rng)
        channel = await self._ready_channel(deadline)
        while self._settings.user and self._token is None:
            try:
                await self._authenticate(channel, deadline)
            except Unavailable:
                wait_s = backoff.next_s()
                if self._clock() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)
                channel = await self._ready_channel(deadline)
        return channel, _HAS_LEADER + ((("token", self._token),) if self._token else ())

    async def _attempt(
        self,
        channel: grpc.aio.Channel,
        method: Method[_Request, _Response],
        request: _Request,
        metadata: _Metadata,
        deadline: float,
    ) -> _Response:
        left_s = max(0.01, deadline - self._clock())
        call = channel.unary_unary(method.path, **method.serializers())
        timeout_s = min(left_s, self._settings.attempt_timeout_s)
        started, failed = self._clock(), True
        try:
            response: _Response = await call(request, timeout=timeout_s, metadata=metadata)
            failed = False
        finally:
            self._observe(method.name, self._clock() - started, failed)
        return response

    async def _authenticate(self, channel: grpc.aio.Channel, deadline: float) -> None:
        async with self._login:
            if self._token is not None:
                return  # Another task logged in while we waited.
            request = etcd_pb2.AuthenticateRequest(name=self._settings.user, password=self._settings.password)
            try:
                response = await self._attempt(channel, _AUTHENTICATE, request, _HAS_LEADER, deadline)
            except grpc.aio.AioRpcError as error:
                grpc_errors.heed_cancellation()
                if not is_auth_off(error):
                    raise self._note_failure(channel, _HAS_LEADER, error) from error
                self._token = _AUTH_OFF
            else:
                self._token = response.token

    async def _ready_channel(self, deadline: float) -> grpc.aio.Channel:
        backoff = Backoff(self._rng, max_s=0.5)
        while True:
            for _ in self._channels:
                channel = self._channels[self._current]
                if await self._connected(channel, deadline):
                    return channel
                self._leave(channel)
            wait_s = backoff.next_s()
            if self._clock() + wait_s >= deadline:
                raise Unavailable(f"no etcd endpoint answers: {', '.join(self._settings.endpoints)}")
            await asyncio.sleep(wait_s)

    async def _connected(self, channel: grpc.aio.Channel, deadline: float) -> bool:
        if channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return True  # This is nearly always true, and the rest would add a tenth to a call's cost.
        timeout_s = min(self._settings.connect_timeout_s, max(0.01, deadline - self._clock()))
        broken = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        try:
            async with asyncio.timeout(timeout_s):
                while (state := channel.get_state(try_to_connect=True)) not in broken:
                    if state is grpc.ChannelConnectivity.READY:
                        return True
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            return False
        return False

    def _leave(self, channel: grpc.aio.Channel) -> None:
        if channel is self._channels[self._current]:
            self._current = (self._current + 1) % len(self._channels)

    def _note_failure(
        self, channel: grpc.aio.Channel, metadata: _Metadata, error: BaseException
    ) -> IsthmusError:
        if not isinstance(error, grpc.aio.AioRpcError):
            self._leave(channel)
            return (
                error if isinstance(error, IsthmusError) else Unavailable(f"etcd's stream broke: {error!r}")
            )
        if is_token_refused(error) and self._settings.user:
            if dict(metadata).get("token", _AUTH_OFF) == self._token:
                self._token = None  # Another call may have renewed the token in the meantime.
            return Unavailable("etcd's token has expired")
        if is_transient(error):
            self._leave(channel)
        return rename(error)


def _open_channel(endpoint: str, tls: TlsConfig | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    return tls.open_channel(endpoint, _CHANNEL_OPTIONS)
