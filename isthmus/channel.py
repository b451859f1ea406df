"""This module opens gRPC channels to a router."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from isthmus.errors import InvalidRequest

_MAX_MESSAGE_BYTES = 64 * 2**20  # This is the router's limit.
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A router whose host died sends no FIN; one that is only busy has enough time to answer.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # This option really limits the wait (grpc/grpc#39239).
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted router is found again within this time, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # retries.py retries, since it knows which pieces have come, and gRPC does not.
    ("grpc.enable_retries", 0),
)

Channel = TypeVar("Channel")


@dataclass(frozen=True, slots=True)
class Tls:
    """The files are PEM.

    Without `ca` the system's authorities are trusted. `cert` and `key` are for a router that wants a client
    certificate. `server_name` is the name in the router's certificate, if that is not the host in the target.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials. Raises OSError if a file cannot be read."""
        return grpc.ssl_channel_credentials(_bytes(self.ca), _bytes(self.key), _bytes(self.cert))


def _bytes(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


@dataclass(frozen=True, slots=True)
class Router:
    """A router has its gRPC API at `target`, HOST:PORT.

    Raises InvalidRequest for a URL, and for a key that no header can contain.
    """

    target: str
    tls: Tls | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.target.startswith(("http://", "https://")):
            raise InvalidRequest(f"the target is HOST:PORT of the gRPC API, not a URL; got {self.target!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequest("an API key is made of printable ASCII")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call: the API key, if there is one."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def open(self) -> grpc.Channel:
        return self._opened(grpc.insecure_channel, grpc.secure_channel)

    def open_aio(self) -> grpc.aio.Channel:
        return self._opened(grpc.aio.insecure_channel, grpc.aio.secure_channel)

    def _opened(self, insecure: Callable[..., Channel], secure: Callable[..., Channel]) -> Channel:
        if self.tls is None:
            return insecure(self.target, options=_OPTIONS)
        name = self.tls.server_name
        options = [*_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else ())]
        return secure(self.target, self.tls.credentials(), options=options)
