"""This module is the commands' client of the router's gRPC API, with its flags and errors."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.settings.cluster_config import ClusterConfig
from services.settings.flags import Bounds, setting
from services.values.errors import ConfigError, InvalidRequest, PeerFailed
from services.values.request import MAX_TIMEOUT_S
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

MAX_TOKENS_BOUNDS = Bounds(at_least=1, at_most=2**31 - 1)
SEED_BOUNDS = Bounds(at_least=0, at_most=2**64 - 1)
MODEL_NAME_HELP = "a model, one's adapter (MODEL:NAME) or an alias; default: the router's --model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    router: str = setting("127.0.0.1:7777", "HOST:PORT of the router's gRPC API")
    tls_ca: Path | None = setting(None, "PEM of the authority of its certificate; turns TLS on")
    tls_cert: Path | None = setting(None, "PEM of our certificate, if the router requires one")
    tls_key: Path | None = setting(None, "PEM of its key")
    tls_server_name: str = setting("", "name that its certificate carries; default: the host in --router")
    api_key_file: Path | None = setting(None, "file that begins with the key to show the router")

    def open_channel(self) -> grpc.aio.Channel:
        if self.tls_ca is None:
            if self.tls_cert or self.tls_key or self.tls_server_name:
                raise ConfigError("the --tls flags need --tls-ca, which turns TLS on")
            return channels.open_channel(self.router)
        mutual = self.tls_cert is not None
        tls = TlsConfig(self.tls_ca, self.tls_cert, self.tls_key, mutual, self.tls_server_name)
        return channels.open_channel(self.router, tls)


def key_metadata(api_key_file: Path | None) -> tuple[tuple[str, str], ...]:
    if api_key_file is None:
        return ()
    try:
        keys = api_key_file.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {error}") from error
    if not keys:
        raise ConfigError(f"--api-key-file: {api_key_file} holds no key")
    return (("authorization", f"Bearer {keys[0]}"),)


def given_prompt(prompt: str) -> str:
    try:
        text = prompt or sys.stdin.read()
        text.encode()
    except UnicodeError as error:
        raise InvalidRequest(f"the prompt is not UTF-8: {error}") from error
    return text


async def responses(
    channel: grpc.aio.Channel,
    request: generation_pb2.GenerateRequest,
    timeout_s: float | None = None,
    metadata: Sequence[tuple[str, str]] = (),
    router: str = "",
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """Yield the responses as they arrive, and cancel the call at the end. Raises the errors of `naming`."""
    stub = generation_pb2_grpc.GenerationStub(channel)
    bounded_s = None if timeout_s is None else min(timeout_s, MAX_TIMEOUT_S)
    call = stub.Generate(request, timeout=bounded_s, metadata=tuple(metadata))
    try:
        with naming(router):
            async for response in call:
                yield response
    finally:
        call.cancel()


# gRPC's messages begin with _NOBODY if no server is reached, and have _HUNG_UP if one closes the connection.
_NOBODY = ("failed to connect to all addresses", "errors resolving")
_HUNG_UP = ("Socket closed", "Connection reset", "handshake failed", "Ssl")


@contextmanager
def naming(router: str) -> Iterator[None]:
    """Raise an error of a call to the router as one of ours.

    If nothing answers at HOST:PORT `router`, the PeerFailed explains what to do.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if router and details.startswith(_NOBODY):
            raise PeerFailed(_unreached(router, details)) from error
        raise grpc_errors.error_from(error) from error


def _unreached(router: str, details: str) -> str:
    why = details.rpartition(": ")[2].strip("]")
    if any(sign in details for sign in _HUNG_UP):
        return f"who answers on {router} hangs up ({why}): does it want TLS, or not? --tls-ca turns it on"
    return f"no router answers on {router} ({why}): `isthmus up MODEL` starts one, --router names another"


_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig(ClusterConfig):
    router: str = setting("127.0.0.1:7777", "HOST:PORT of a router's gRPC API")
    api_key_file: Path | None = setting(None, "file that begins with the key to show the router")

    def open_channel(self) -> grpc.aio.Channel:
        return channels.open_channel(self.router, self.tls())


async def ask(
    config: ClientConfig | RanksConfig, method: str, request: Any, timeout_s: float = _ANSWER_TIMEOUT_S
) -> Any:
    """Return the router's answer to a call of this method of its API. Raises the errors of `naming`."""
    metadata = key_metadata(config.api_key_file)
    async with config.open_channel() as channel:
        call = getattr(generation_pb2_grpc.GenerationStub(channel), method)
        with naming(config.router):
            return await call(request, timeout=timeout_s, metadata=metadata)


async def ask_for_ranks(config: RanksConfig) -> generation_pb2.ListRanksResponse:
    answer: generation_pb2.ListRanksResponse
    answer = await ask(config, "ListRanks", generation_pb2.ListRanksRequest())
    return answer
