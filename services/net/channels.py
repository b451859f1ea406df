"""This module opens channels to our servers, with TLS or without, and has the options of both ends.

TLS files may change while we run. gRPC's own channels keep the credentials that they were made with, even
when they connect again. So our channel is made of several of them:

    connected -----------------------------------> the same one, whatever the files hold now
    not connected, files unchanged --------------> the same one
    not connected, files have changed -----------> a new one; the old one remains for the calls that it still
                                                   has, and is closed with the last of them
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from services.net.certificates import Certificates, Pem, certificates_of
from services.values.errors import ConfigError

_READY = grpc.ChannelConnectivity.READY


class ReloadingChannel(grpc.aio.Channel):
    """One event loop owns this channel. `connect` makes gRPC's channel for the content of the files."""

    def __init__(self, certificates: Certificates, connect: Callable[[Pem], grpc.aio.Channel]) -> None:
        self._certificates = certificates
        self._connect = connect
        self._pem = certificates.look()
        self._newest = _Used(connect(self._pem))
        self._older: set[_Used] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"ReloadingChannel(older={len(self._older)}, closed={self._closed})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await asyncio.gather(*(used.channel.close(grace) for used in (self._newest, *self._older)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state = self._newest.channel.get_state(try_to_connect)
        if state is _READY or not self._renewed():
            return state
        return self._newest.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        with self._using() as channel:
            await channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not _READY:
            await self.wait_for_state_change(state)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "stream_stream", args, kwargs)

    def _call(
        self, kind: str, method: tuple[Any, ...], how: dict[str, Any], *args: Any, **kwargs: Any
    ) -> grpc.aio.Call:
        self.get_state()  # The files may have changed.
        used = self._newest
        call: grpc.aio.Call = getattr(used.channel, kind)(*method, **how)(*args, **kwargs)
        used.num_uses += 1
        call.add_done_callback(lambda _: self._release(used))
        return call

    @contextmanager
    def _using(self) -> Iterator[grpc.aio.Channel]:
        used = self._newest
        used.num_uses += 1
        try:
            yield used.channel
        finally:
            self._release(used)

    def _renewed(self) -> bool:
        pem = self._certificates.look()
        if pem is self._pem or self._closed:
            return False
        old, self._pem = self._newest, pem
        self._newest = _Used(self._connect(pem))
        self._older.add(old)
        old.num_uses += 1
        self._release(old)
        return True

    def _release(self, used: "_Used") -> None:
        used.num_uses -= 1
        if used.num_uses == 0 and used in self._older and used.closing is None and not self._closed:
            used.closing = asyncio.create_task(used.channel.close(), name="close-channel")
            used.closing.add_done_callback(lambda _: self._older.discard(used))


class _Used:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_uses = 0
        self.closing: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """These are PEM files. With `mutual` each side shows its certificate and checks the other's against `ca`.

    `server_name` is the name that a server's certificate must carry; "" means the host in the endpoint. Ranks
    share a name if they have addresses that no certificate can foresee (a pod's). `peer_name` is the name
    that a client's certificate must carry, if a server wants one; with "" any certificate of the CA will do.
    `client_ca` vouches for further clients of a server, and for no server.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    mutual: bool = False
    server_name: str = ""
    peer_name: str = ""
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key, or neither")
        if self.mutual and (self.ca is None or self.cert is None):
            raise ConfigError("mutual TLS needs a CA, a certificate and its key")
        if (self.client_ca or self.peer_name) and not self.mutual:
            raise ConfigError("what clients' certificates must be is for mutual TLS, which asks for them")

    @property
    def certificates(self) -> Certificates:
        return certificates_of(self.ca, self.cert, self.key, self.client_ca)

    def for_server(self) -> grpc.ServerCredentials:
        """Make credentials that read the files for each new connection. Raises ConfigError."""
        if self.cert is None:
            raise ConfigError("a TLS server needs a certificate and its key")
        certificates = self.certificates
        shown = certificates.look()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return None to keep the current files; a thread of gRPC calls this at each handshake."""
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
            [(pem.key, pem.cert)], pem.client_authorities if self.mutual else None
        )

    def for_channel(self, pem: Pem) -> grpc.ChannelCredentials:
        key, cert = (pem.key, pem.cert) if self.mutual else (None, None)
        return grpc.ssl_channel_credentials(pem.ca, key, cert)

    def open_channel(self, endpoint: str, options: Sequence[tuple[str, int | str]]) -> grpc.aio.Channel:
        """Open a channel that reads the files each time it connects. Raises ConfigError."""
        if self.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]

        def connect(pem: Pem) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(endpoint, self.for_channel(pem), options=options)

        return ReloadingChannel(self.certificates, connect)


MAX_MESSAGE_BYTES = 64 * 2**20


def message_options(max_received_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


# A peer whose host died sends no FIN: pings detect this within keepalive time + timeout. A killed process is
# detected at once without them. So the timeout must cover the time in which a living peer may be unable to
# answer: on a crowded host an ordinary process may wait for a CPU for more than 5 s.
_PING_TIMEOUT_MS = 20_000
KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    # The option above has no effect; this one limits the wait for a ping's answer (grpc/grpc#39239).
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    *message_options(),
    *KEEPALIVE_OPTIONS,
    # A restarted rank is found again within this time, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A new channel must not wait for the backoff of one that failed before.
    ("grpc.use_local_subchannel_pool", 1),
    # The router retries itself, since it knows what it has already yielded.
    ("grpc.enable_retries", 0),
]


def open_channel(endpoint: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    return tls.open_channel(endpoint, _CHANNEL_OPTIONS)
