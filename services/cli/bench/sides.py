"""This module sends a load through one of two APIs: our gRPC API, or the OpenAI API over HTTP.

Over HTTP each request has a connection of its own, as in other benchmarks, and streams a completion.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
import h11

from services.cli.router_client import responses
from services.net import grpc_errors
from services.values.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    NotFound,
    PeerFailed,
    Unauthenticated,
    Unavailable,
)
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc


@dataclass(frozen=True, slots=True)
class LoadRequest:
    token_ids: Sequence[int]
    max_tokens: int
    conversation: str


@dataclass(frozen=True, slots=True)
class Counts:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    decode_prefix_len: int = 0
    delta_tokens: int = 0
    kv_bytes_moved: int = 0
    kv_bytes_saved: int = 0
    pulled_tokens: int = 0
    pulled_bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


COUNTED = tuple(each.name for each in fields(Counts))


@dataclass(frozen=True, slots=True)
class Arrival:
    """These are tokens that came together; the last one has the request's counts.

    `token_ids` is empty if a server sends only text.
    """

    num_tokens: int = 0
    token_ids: Sequence[int] = ()
    counts: Counts | None = None


class LoadTarget(Protocol):
    name: str

    def ask(self, request: LoadRequest) -> AsyncIterator[Arrival]:
        pass

    async def is_token(self, token_id: int) -> bool: ...

    async def close(self) -> None: ...


async def vocab_size_of(side: LoadTarget) -> int:
    """Find the size by bisection, asking which ids are tokens: no call returns the size."""
    low, high = 0, 1
    while await side.is_token(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await side.is_token(middle) else (low, middle)
    return high


class GrpcSide:
    name = "gRPC"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: tuple[tuple[str, str], ...],
        model: str,
        tenant: str,
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._model = model
        self._tenant = tenant
        self._timeout_s = timeout_s

    async def ask(self, request: LoadRequest) -> AsyncIterator[Arrival]:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        message = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=request.token_ids),
            model=self._model,
            sampling=sampling,
            conversation_id=request.conversation,
            tenant=self._tenant,
        )
        async for response in responses(self._channel, message, self._timeout_s, self._metadata):
            counts = None
            if response.HasField("finish"):
                usage = response.finish.usage
                counts = Counts(*(getattr(usage, name) for name in COUNTED))
            yield Arrival(len(response.token_ids), response.token_ids, counts)

    async def is_token(self, token_id: int) -> bool:
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        request = generation_pb2.DetokenizeRequest(
            model=self._model, token_ids=[token_id], tenant=self._tenant
        )
        try:
            with grpc_errors.renaming():
                await stub.Detokenize(request, timeout=self._timeout_s, metadata=self._metadata)
        except InvalidRequest:
            return False
        return True

    async def close(self) -> None:
        await self._channel.close()


_READ_BYTES = 65_536
_DATA = b"data: "
_ERRORS: Mapping[int, type[IsthmusError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    404: NotFound,
    429: NoCapacity,
    503: Unavailable,
    504: DeadlineExceeded,
}


@dataclass(frozen=True, slots=True)
class Url:
    host: str
    port: int
    tls: bool
    path: str  # This prefix comes before the API's own path.

    @classmethod
    def parse(cls, text: str) -> "Url":
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--http: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--http: expected http://HOST:PORT, got {text!r}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)


class HttpSide:
    name = "HTTP"

    def __init__(
        self,
        url: Url,
        headers: Mapping[str, str],
        model: str,
        tenant: str,
        timeout_s: float,
        context: ssl.SSLContext,
    ) -> None:
        self._url = url
        self._model = {"model": model} if model else {}
        self._headers = {**headers, **({"x-isthmus-tenant": tenant} if tenant else {})}
        self._timeout_s = timeout_s
        self._context = context

    async def ask(self, request: LoadRequest) -> AsyncIterator[Arrival]:
        body = {
            **self._model,
            "prompt": [*request.token_ids],
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {"x-isthmus-conversation": request.conversation} if request.conversation else {}
        counts = Counts()
        async with asyncio.timeout(self._timeout_s), self._posted("/v1/completions", body, headers) as answer:
            async for event in _events(answer):
                counts = _counted(event, counts)
                for choice in event.get("choices", ()):
                    ids = choice.get("token_ids") or ()
                    if ids or choice.get("text"):
                        yield Arrival(len(ids) or 1, ids)
        yield Arrival(counts=counts)

    async def is_token(self, token_id: int) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._posted("/detokenize", {**self._model, "tokens": [token_id]}, {}) as answer:
                    await answer.rest()
        except InvalidRequest:
            return False
        return True

    async def close(self) -> None:
        pass

    @asynccontextmanager
    async def _posted(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator["_Exchange"]:
        url = self._url
        try:
            reader, writer = await asyncio.open_connection(
                url.host, url.port, ssl=self._context if url.tls else None
            )
        except OSError as error:
            raise Unavailable(f"{url.host}:{url.port}: {error}") from error
        try:
            exchange = _Exchange(reader, writer)
            await exchange.send(f"{url.host}:{url.port}", url.path + path, body, {**self._headers, **headers})
            yield exchange
        except (OSError, h11.RemoteProtocolError) as error:
            raise PeerFailed(f"{url.host}:{url.port}: {error}") from error
        finally:
            writer.close()


class _Exchange:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, host: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        content = json.dumps(body, separators=(",", ":")).encode()
        fields = [("host", host), ("content-type", "application/json"), ("content-length", str(len(content)))]
        fields += [("connection", "close"), *headers.items()]
        request = h11.Request(method="POST", target=path, headers=fields)
        events = (request, h11.Data(content), h11.EndOfMessage())
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self._writer.drain()
        response = await self._next()
        while isinstance(response, h11.InformationalResponse):
            response = await self._next()
        if not isinstance(response, h11.Response):
            raise PeerFailed("the connection ended before an answer")
        if response.status_code != 200:
            error = _ERRORS.get(response.status_code, PeerFailed)
            raise error(f"{response.status_code}: {(await self.rest())[:300].decode(errors='replace')}")

    async def rest(self) -> bytes:
        return b"".join([data async for data in self.data()])

    async def data(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event


async def _events(answer: _Exchange) -> AsyncIterator[Mapping[str, Any]]:
    rest = b""
    async for data in answer.data():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and line[len(_DATA) :].strip() != b"[DONE]":
                event: Mapping[str, Any] = json.loads(line[len(_DATA) :])
                if "error" in event:
                    raise PeerFailed(str(event["error"]))
                yield event


def _counted(event: Mapping[str, Any], before: Counts) -> Counts:
    usage, ours = event.get("usage") or {}, event.get("isthmus") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counted = {**ours, **usage, "reused_tokens": cached}
    return Counts(
        *(counted[name] if counted.get(name) is not None else getattr(before, name) for name in COUNTED)
    )
