"""This module handles messages of the Generation service without reading their token ids one by one.

protobuf reads a repeated field number by number: 100,000 ids take 2 ms each time, and a message that contains
them is packed once to find its size and once to be sent. So token ids stay packed as protobuf packs them, and
what is only forwarded stays bytes: varints, one after the other, in a field like a string's
(https://protobuf.dev/programming-guides/encoding). The ids of a GenerateRequest's prompt are read separately:

    sampling | token_ids { 32,000 ids } | tenant      as received
    sampling | token_ids {}             | tenant      read by protobuf
                           32,000 ids                 PackedIds

A message with another layout (two prompts, an unknown field beside the ids) is read by protobuf alone.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse, TokenIds

_MORE = 0x80  # All bytes of a varint except the last have this bit.
_MOST_BYTES = 5  # A varint below 2**32 has at most this many bytes.
_BEFORE = bytes(7)  # These precede the first varint.
LENGTH_DELIMITED = 2  # This is a wire type.
_MANY_BYTES = 1 << 10  # From a few hundred varints on numpy takes half of protobuf's time.


@dataclass(frozen=True, slots=True)
class PackedIds:
    """It has the same ids twice: as `array("I")` and as varints."""

    ids: "array[int]"
    varints: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        return cls.from_proto(TokenIds(ids=ids))

    @classmethod
    def from_proto(cls, pb: TokenIds) -> Self:
        pb.DiscardUnknownFields()
        varints = _payload(pb.SerializeToString())
        # protobuf also returns the ids number by number.
        return cls(array("I", pb.ids), varints) if len(varints) < _MANY_BYTES else cls.from_varints(varints)

    @classmethod
    def from_varints(cls, varints: bytes) -> Self:
        return cls(unpacked(varints), varints)

    def field(self, number: int) -> bytes:
        """Return the ids as a message's `repeated uint32` of that number, to be merged or appended."""
        return length_delimited(number, self.varints) if self.varints else b""


def unpacked(varints: bytes) -> "array[int]":
    """Return the numbers of at least one varint, all below 2**32. Raises ValueError if the last one is cut
    off, or if one has more than five bytes or 32 bits."""
    octets = np.frombuffer(_BEFORE + varints, np.uint8)
    ends = np.flatnonzero(octets[len(_BEFORE) :] < _MORE)
    if not len(ends) or ends[-1] != len(varints) - 1:
        raise ValueError("the last number breaks off")
    num_bytes = np.diff(ends, prepend=ends.dtype.type(-1))
    most_bytes = int(num_bytes.max())
    if most_bytes > _MOST_BYTES:
        raise ValueError(f"a number takes {most_bytes} bytes")
    dtype = np.dtype("<u4" if most_bytes <= 4 else "<u8")
    # Each byte is read together with those before it: at a number's last byte such a window has the whole
    # number, below it bytes that do not belong to it.
    windows = np.ndarray(len(varints), dtype, octets, len(_BEFORE) + 1 - dtype.itemsize, (1,))
    # This makes one copy, since gathering unaligned values takes longer.
    windows = np.ascontiguousarray(windows).take(ends)
    windows >>= ((dtype.itemsize - num_bytes) * 8).astype(dtype)
    numbers = windows & 0x7F
    for nth in range(1, most_bytes):
        numbers |= (windows >> nth) & (0x7F << 7 * nth)
    if most_bytes == _MOST_BYTES and numbers.max() >= 1 << 32:
        raise ValueError("a number is too large")
    return array("I", numbers.astype(np.uint32, copy=False).tobytes())


def length_delimited(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(payload)) + payload


def _payload(field: bytes) -> bytes:
    """Return the payload of a message's only field, whose tag is one byte; it is empty if there is none."""
    if not field:
        return b""
    length_end = next(at for at in range(1, len(field)) if field[at] < _MORE)
    return field[length_end + 1 :]


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number >= _MORE:
        octets.append(number & 0x7F | _MORE)
        number >>= 7
    octets.append(number)
    return bytes(octets)


# Reading ids separately is less work from the first size on, and takes little memory up to the second.
_LEAST_APART_BYTES, _MOST_APART_BYTES = 1 << 10, 4 << 20
_MOST_FIELDS = 32  # At most this many fields are read; we know a dozen.
_FIXED_BYTES = {1: 8, 5: 4}  # The keys are wire types.
_VARINT = 0
_MOST_VARINT_BYTES = 10  # A number of 64 bits has at most this many bytes.

_PROMPTS = {field.number for field in GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields}
_TOKEN_IDS = GenerateRequest.TOKEN_IDS_FIELD_NUMBER
_IDS = TokenIds.IDS_FIELD_NUMBER


class ReadRequest(NamedTuple):
    """`ids` are those of `request.token_ids`, which is then empty; if None, any ids are in the request."""

    request: GenerateRequest
    ids: PackedIds | None


class _Field(NamedTuple):
    number: int
    wire_type: int
    begins: int
    payload_begins: int
    ends: int


def read_request(message: bytes) -> ReadRequest:
    if _LEAST_APART_BYTES <= len(message) <= _MOST_APART_BYTES:
        try:
            read = _read_apart(message)
        except (IndexError, ValueError):  # The message is cut off or has another layout: protobuf decides.
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
        tag, payload = _read_varint(message, at)
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            length, payload = _read_varint(message, payload)
            ends = payload + length
        elif wire_type == _VARINT:
            _, ends = _read_varint(message, payload)
        elif wire_type in _FIXED_BYTES:
            ends = payload + _FIXED_BYTES[wire_type]
        else:
            raise ValueError("a group")
        if ends > end:
            raise ValueError("a field breaks off")
        yield _Field(tag >> 3, wire_type, at, payload, ends)
        at = ends
    raise ValueError("too many fields")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        octet = message[at]
        at += 1
        number |= (octet & 0x7F) << shift
        if octet < 0x80:
            return number, at
    raise ValueError("a number is too long")


class JoinedResponses:
    def __init__(self) -> None:
        self._joined = GenerateResponse()
        self._texts: list[str] = []
        self._reasonings: list[str] = []

    def add(self, response: GenerateResponse) -> None:
        self._texts.append(response.text)
        self._reasonings.append(response.reasoning)
        self._joined.MergeFrom(response)  # This appends to the lists, and replaces texts and finish.

    @property
    def has_finished(self) -> bool:
        return bool(self._joined.HasField("finish"))

    def whole(self) -> GenerateResponse:
        """Return all responses in one. Call it once, after the last one."""
        self._joined.text, self._joined.reasoning = "".join(self._texts), "".join(self._reasonings)
        return self._joined
