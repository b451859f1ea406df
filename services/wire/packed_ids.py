"""Token ids stay packed as protobuf packs them, so that what is only forwarded stays bytes.

protobuf takes a repeated field in number by number: 100,000 ids take it 2 ms each time, and a message that
holds them is packed once to learn its size and once to be sent. Packed they are varints, one after the other,
in a field like a string's (https://protobuf.dev/programming-guides/encoding).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from services.wire.isthmus.v1.generation_pb2 import TokenIds

_MORE = 0x80  # All of a varint's bytes but the last have it.
_MOST_BYTES = 5  # A varint below 2**32 has no more.
_BEFORE = bytes(7)  # They stand in front of the first varint.
LENGTH_DELIMITED = 2  # It is the wire type.
_MANY_BYTES = 1 << 10  # From some hundred varints on numpy takes half of protobuf's time.


@dataclass(frozen=True, slots=True)
class PackedIds:
    """The same ids stand twice: as `array("I")` and as varints."""

    ids: "array[int]"
    varints: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        return cls.from_proto(TokenIds(ids=ids))

    @classmethod
    def from_proto(cls, pb: TokenIds) -> Self:
        """Return the message's ids. Fields of `pb` that we do not know are discarded."""
        pb.DiscardUnknownFields()
        varints = _payload(pb.SerializeToString())
        # Out of a message protobuf hands over number by number, too.
        return cls(array("I", pb.ids), varints) if len(varints) < _MANY_BYTES else cls.from_varints(varints)

    @classmethod
    def from_varints(cls, varints: bytes) -> Self:
        """Return the ids of at least one varint. Raises ValueError as `unpacked`."""
        return cls(unpacked(varints), varints)

    def field(self, number: int) -> bytes:
        """Return a message's field of that number, which is `repeated uint32` there: to be merged or
        appended."""
        return length_delimited(number, self.varints) if self.varints else b""


def unpacked(varints: bytes) -> "array[int]":
    """Return the numbers of at least one varint, all below 2**32.

    Raises ValueError where the last one is not whole, or one takes more than five bytes or bits than 32 has.
    """
    octets = np.frombuffer(_BEFORE + varints, np.uint8)
    ends = np.flatnonzero(octets[len(_BEFORE) :] < _MORE)
    if not len(ends) or ends[-1] != len(varints) - 1:
        raise ValueError("the last number breaks off")
    num_bytes = np.diff(ends, prepend=ends.dtype.type(-1))
    most_bytes = int(num_bytes.max())
    if most_bytes > _MOST_BYTES:
        raise ValueError(f"a number takes {most_bytes} bytes")
    dtype = np.dtype("<u4" if most_bytes <= 4 else "<u8")
    # Each byte is taken with those in front of it: a number's last byte has all of it, below it what is not
    # its own.
    windows = np.ndarray(len(varints), dtype, octets, len(_BEFORE) + 1 - dtype.itemsize, (1,))
    # This is one copy: to gather what is not aligned takes longer.
    windows = np.ascontiguousarray(windows).take(ends)
    windows >>= ((dtype.itemsize - num_bytes) * 8).astype(dtype)
    numbers = windows & 0x7F
    for nth in range(1, most_bytes):
        numbers |= (windows >> nth) & (0x7F << 7 * nth)
    if most_bytes == _MOST_BYTES and numbers.max() >= 1 << 32:
        raise ValueError("a number is too large")
    return array("I", numbers.astype(np.uint32, copy=False).tobytes())


def length_delimited(number: int, payload: bytes) -> bytes:
    """Return a field that is a message, a string, bytes or packed numbers."""
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(payload)) + payload


def _payload(field: bytes) -> bytes:
    """Return the payload of a message's one field, whose tag is a byte; it is empty where there is none."""
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
