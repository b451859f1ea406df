"""Bodies that clients send compressed (RFC 9110, 8.4) are unpacked here."""

import io
import zlib
from collections.abc import Callable, Mapping

import zstandard

from services.router.dialects.http_statuses import BodyTooLong, UnknownEncoding
from services.values.errors import InvalidRequest

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
