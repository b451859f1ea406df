"""A GenerateRequest is read with its prompt's ids apart: protobuf takes them number by number.

    sampling | token_ids { 32,000 ids } | tenant      as it comes
    sampling | token_ids {}             | tenant      read by protobuf
                           32,000 ids                 PackedIds

What is not laid out so protobuf reads alone: two prompts, a field beside the ids that is not known.
"""

from collections.abc import Iterator
from typing import NamedTuple

from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, TokenIds
from services.wire.packed_ids import LENGTH_DELIMITED, PackedIds, length_delimited

_MANY_BYTES, _MOST_BYTES = 1 << 10, 4 << 20  # Between them it is less work, and takes little memory.
_MOST_FIELDS = 32  # So many are looked through: we know of a dozen.
_FIXED_BYTES = {1: 8, 5: 4}  # The key is the wire type.
_VARINT = 0
_MOST_VARINT_BYTES = 10  # A number of 64 bits has no more.

_PROMPTS = {field.number for field in GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields}
_TOKEN_IDS = GenerateRequest.TOKEN_IDS_FIELD_NUMBER
_IDS = TokenIds.IDS_FIELD_NUMBER


class ReadRequest(NamedTuple):
    """`ids` are those of `request.token_ids`, which is empty then; where it is None, the ids are in the
    request, if there are any."""

    request: GenerateRequest
    ids: PackedIds | None


class _Field(NamedTuple):
    number: int
    wire_type: int
    begins: int
    payload_begins: int
    ends: int


def read_request(message: bytes) -> ReadRequest:
    """Return the request. Raises google.protobuf.message.DecodeError."""
    if _MANY_BYTES <= len(message) <= _MOST_BYTES:
        try:
            read = _read_apart(message)
        except (IndexError, ValueError):  # It breaks off, or is not written as we write it: protobuf knows.
            read = None
        if read is not None:
            return read
    return ReadRequest(GenerateRequest.FromString(message), None)


def _read_apart(message: bytes) -> ReadRequest | None:
    prompts = [field for field in _fields(message, 0, len(message)) if field.number in _PROMPTS]
    if [(field.number, field.wire_type) for field in prompts] != [(_TOKEN_IDS, LENGTH_DELIMITED)]:
        return None
    (prompt,) = prompts
    inner = list(_fields(message, prompt.payload_begins, prompt.ends))
    if [(field.number, field.wire_type) for field in inner] != [(_IDS, LENGTH_DELIMITED)]:
        return None
    ids = PackedIds.from_varints(message[inner[0].payload_begins : prompt.ends])
    rest = message[: prompt.begins] + length_delimited(_TOKEN_IDS, b"") + message[prompt.ends :]
    return ReadRequest(GenerateRequest.FromString(rest), ids)


def _fields(message: bytes, at: int, end: int) -> Iterator[_Field]:
    for _ in range(_MOST_FIELDS):
        if at == end:
            return
        tag, payload = _varint(message, at)
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            length, payload = _varint(message, payload)
            ends = payload + length
        elif wire_type == _VARINT:
            _, ends = _varint(message, payload)
        elif wire_type in _FIXED_BYTES:
            ends = payload + _FIXED_BYTES[wire_type]
        else:
            raise ValueError("a group")
        if ends > end:
            raise ValueError("a field breaks off")
        yield _Field(tag >> 3, wire_type, at, payload, ends)
        at = ends
    raise ValueError("too many fields")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number, and where it ends. Raises ValueError, IndexError."""
    number = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        octet = message[at]
        at += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, at
    raise ValueError("a number is too long")
