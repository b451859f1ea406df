"""A request's body is read off the wire, and the time that its client gives it.

length that is stated, or has come, above the largest      413
all bodies that are held are too many bytes, unpacked      429
longer than 64 KiB                                         waits for its turn: one at a time, in a thread
a list of more items than the context has tokens           400, before anything is made of an item
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

_ZSTD_WINDOW_BYTES = 8 << 20  # A sender over HTTP may need so much of a reader at most (RFC 9659).
_GZIP = 31  # It is zlib's word for gzip.
_MOST_MEMBERS = 64
_RAW_DEFLATE = -15  # It is zlib's word for a body without a header, as some clients send it.


def decoded(body: bytearray, content_encoding: str, max_bytes: int) -> bytes | bytearray:
    """Return the body without its Content-Encoding, of which no more than `max_bytes` is ever made.

    Raises UnknownEncoding, BodyTooLong, and InvalidRequest where the bytes are none of that encoding.
    """
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
    """Return what the members come to: RFC 1952 allows several. Each costs time, also where there is
    nothing in it."""
    plain, rest = bytearray(), bytes(body)
    for _ in range(_MOST_MEMBERS):
        decoder = zlib.decompressobj(_GZIP)
        plain += _whole(decoder, rest, most - len(plain))
        rest = decoder.unused_data.lstrip(b"\0")  # Zeros pad files on tapes.
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
_HELD = "isthmus.held_bytes"  # A request's scope has the HeldBytes of its call there.
_LONG_BODY = 64 << 10  # It is in bytes; every stream on the loop would feel the reading of a longer one.


class CountedBodies:
    """This ASGI middleware holds what BodyReader keeps of a body until its request has been answered: what
    is made of it lives as long. What nobody keeps is not counted."""

    def __init__(self, app: ASGIApp, in_flight: BytesInFlight) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._in_flight.call() as held:
            await self._app({**scope, _HELD: held}, receive, send)


class BodyReader:
    """A text stands for each image of a body where `leaves_images_out` is set; else whoever reads the body
    refuses it."""

    def __init__(
        self,
        max_body_bytes: int,
        context_tokens: Callable[[], int | None] = lambda: None,
        *,
        leaves_images_out: bool = False,
    ) -> None:
        """`context_tokens` tells the ranks' context, which bounds a list whose items are a token at least,
        or None where it is not known."""
        self._max_body_bytes = max_body_bytes
        self._context_tokens = context_tokens
        self._leaves_images_out = leaves_images_out
        self._long_bodies = asyncio.Lock()

    async def read(
        self, request: Request, read: Callable[[Mapping[str, object], Mapping[str, str]], _T]
    ) -> _T:
        """Return what `read` makes of the body's fields and the headers, in a thread where the body is long.

        Raises InvalidRequest, ClientLeft, NoCapacity.
        """
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
            plain = await asyncio.to_thread(decoded, body, encoding, self._max_body_bytes)
            if held is not None:
                held.add(len(plain) - len(body))
            return await asyncio.to_thread(read_fields, plain)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Read one body at a time: two threads would both keep the loop from running. JSON is read without
        ever letting it run, so the next one waits for as long as this one took."""
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
        if num_bytes > self._max_body_bytes:
            raise BodyTooLong(f"the body must be at most {self._max_body_bytes} bytes")

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
    """Return the seconds that the client gives. In gRPC every client sends its deadline; HTTP has no
    header for it. Raises InvalidRequest."""
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
