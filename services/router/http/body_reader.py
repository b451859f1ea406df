"""This module reads a request's body, and the time limit that the client sets.

a length, stated or received, above the limit             413
too many bytes of bodies at once, decoded                 429
a body above 64 KiB                                       waits until it is read alone, in a thread
a list with more items than the context has tokens        400, before its items are read
"""

import asyncio
import io
import json
import math
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.net.bytes_in_flight import BytesInFlight, HeldBytes
from services.router.dialects.http_errors import BodyTooLong, UnknownEncoding
from services.router.dialects.json_body import without_images
from services.router.http.event_stream import ClientLeft
from services.values.errors import ContextExceeded, InvalidRequest

_ZSTD_WINDOW_BYTES = 8 << 20  # RFC 9659 allows no larger window over HTTP.
_GZIP = 31  # zlib reads a gzip header with this value.
_MOST_MEMBERS = 64
_RAW_DEFLATE = -15  # zlib expects no header with this value; some clients send none.


def decoded(body: bytearray, content_encoding: str, max_bytes: int) -> bytes | bytearray:
    """Return the body without its Content-Encoding; at most `max_bytes` + 1 bytes of it are ever decoded.
    Raises UnknownEncoding, BodyTooLong, and InvalidRequest where the bytes are not of that encoding."""
    names = [name.strip().lower() for name in content_encoding.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return body
    if len(names) > 1 or names[0] not in ENCODINGS:
        known = ", ".join(ENCODINGS)
        raise UnknownEncoding(f"Content-Encoding must be one of {known}, got {content_encoding!r}")
    try:
        plain = ENCODINGS[names[0]](body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidRequest(f"the body cannot be read as {names[0]}: {error}") from error
    if len(plain) > max_bytes:
        raise BodyTooLong(f"the body must be at most {max_bytes} bytes once it is decoded")
    return plain


def _gunzip(body: bytearray, most: int) -> bytes:
    """RFC 1952 allows several members. Each takes time, even an empty one, so their number is limited."""
    plain, rest = bytearray(), bytes(body)
    for _ in range(_MOST_MEMBERS):
        decoder = zlib.decompressobj(_GZIP)
        plain += _whole(decoder, rest, most - len(plain))
        rest = decoder.unused_data.lstrip(b"\0")  # Zeros pad a file on tape.
        if not rest or len(plain) == most:
            return bytes(plain)
    raise zlib.error(f"it has more than {_MOST_MEMBERS} members")


def _inflate(body: bytearray, most: int) -> bytes:
    try:
        return _whole(zlib.decompressobj(), body, most)
    except zlib.error:
        return _whole(zlib.decompressobj(_RAW_DEFLATE), body, most)


def _whole(decoder: "zlib._Decompress", body: bytes | bytearray, most: int) -> bytes:
    plain = decoder.decompress(body, most)
    if not decoder.eof and len(plain) < most:
        raise zlib.error("it ends too early")
    return plain


def _unzstd(body: bytearray, most: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as stream:
        return stream.read(most)


ENCODINGS: Mapping[str, Callable[[bytearray, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "zstd": _unzstd,
}


_T = TypeVar("_T")

_TIMEOUT_HEADER = "x-isthmus-timeout-s"
_PROMPT_LISTS = ("messages", "input", "tools", "prompt", "input_ids")
_HELD = "isthmus.held_bytes"  # A request's scope has the HeldBytes of its call here.
_LONG_BODY = 64 << 10  # This is in bytes. A longer body would block all streams of the loop.


class CountedBodies:
    """This ASGI middleware counts the bytes that BodyReader keeps of a body until its request has been
    answered: what is made of the body lives as long."""

    def __init__(self, app: ASGIApp, in_flight: BytesInFlight) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._in_flight.call() as held:
            await self._app({**scope, _HELD: held}, receive, send)


class BodyReader:
    def __init__(
        self,
        max_body_bytes: Callable[[], int],
        context_tokens: Callable[[], int | None] = lambda: None,
        *,
        leaves_images_out: bool = False,
    ) -> None:
        """`context_tokens` returns the ranks' context, or None where it is unknown; each item of a prompt
        list is at least one token. `leaves_images_out` puts a text in the place of each image, which is an
        error otherwise."""
        self._max_body_bytes = max_body_bytes
        self._context_tokens = context_tokens
        self._leaves_images_out = leaves_images_out
        self._long_bodies = asyncio.Lock()

    async def read(
        self, request: Request, read: Callable[[Mapping[str, object], Mapping[str, str]], _T]
    ) -> _T:
        """Return what `read` makes of the body's fields and the headers. A long body is read in a thread.
        Raises InvalidRequest, ClientLeft and NoCapacity."""
        held: HeldBytes | None = request.scope.get(_HELD)
        body = await self._received(request, held)
        encoding = request.headers.get("content-encoding", "")

        def read_fields(plain: bytes | bytearray) -> _T:
            fields = _fields_of(plain)
            self._check_lists(fields)
            return read(without_images(fields) if self._leaves_images_out else fields, request.headers)

        if len(body) < _LONG_BODY and not encoding:
            return read_fields(body)
        async with self._turn():
            plain = await asyncio.to_thread(decoded, body, encoding, self._max_body_bytes())
            if held is not None:
                held.add(len(plain) - len(body))
            return await asyncio.to_thread(read_fields, plain)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Let one body at a time be read, as each thread stops the loop. Parsing JSON never lets the loop
        run, so the next body waits for as long as this one took."""
        await self._long_bodies.acquire()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            yield
        finally:
            loop.call_later(loop.time() - began_s, self._long_bodies.release)

    async def _received(self, request: Request, held: HeldBytes | None) -> bytearray:
        body = bytearray()
        stated = request.headers.get("content-length", "")
        if stated.isdecimal():
            self._check_length(int(stated))
        try:
            async for chunk in request.stream():
                body += chunk
                self._check_length(len(body))
                if held is not None:
                    held.add(len(chunk))
        except ClientDisconnect as error:
            raise ClientLeft("the client closed the connection") from error
        return body

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > (most := self._max_body_bytes()):
            raise BodyTooLong(f"the body must be at most {most} bytes")

    def _check_lists(self, fields: Mapping[str, object]) -> None:
        most = self._context_tokens()
        if most is None:
            return
        for name in _PROMPT_LISTS:
            value = fields.get(name)
            if isinstance(value, list) and len(value) > most:
                raise ContextExceeded(
                    f"{name} must be at most {most} items, got {len(value)}. "
                    f"This model's maximum context length is {most} tokens"
                )


def _fields_of(body: bytes | bytearray) -> Mapping[str, object]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def read_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the client allows, or None. HTTP has no standard header for a deadline, unlike
    gRPC. Raises InvalidRequest."""
    value = headers.get(_TIMEOUT_HEADER)
    if value is None:
        return None
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < math.inf:
        raise InvalidRequest(
            f"the header {_TIMEOUT_HEADER} must be a number of seconds above 0, got {value!r}"
        )
    return timeout_s
