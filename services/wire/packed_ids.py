"""Token ids as protobuf packs them, so that what is only carried stays bytes. Pure.

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

_MORE = 0x80  # of a varint's bytes, all but the last have it
_MOST_BYTES = 5  # of a varint below 2**32
_LENGTH_DELIMITED = 2  # wire type
_MANY_BYTES = 1 << 10  # of varints: from some hundred on numpy takes half of protobuf's time


@dataclass(frozen=True, slots=True)
class PackedIds:
    """The same ids twice: as `array("I")` and as varints."""

    ids: "array[int]"
    varints: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        return cls.from_proto(TokenIds(ids=ids))

    @classmethod
    def from_proto(cls, pb: TokenIds) -> Self:
        """Fields of `pb` that we do not know are discarded."""
        pb.DiscardUnknownFields()
        varints = _payload(pb.SerializeToString())
        # Out of a message protobuf hands over number by number, too.
        return cls(array("I", pb.ids) if len(varints) < _MANY_BYTES else unpacked(varints), varints)

    def field(self, number: int) -> bytes:
        """Of a message whose field of that number is `repeated uint32`: to be merged or appended."""
        return length_delimited(number, self.varints) if self.varints else b""


def unpacked(varints: bytes) -> "array[int]":
    """The numbers of at least one whole varint, all below 2**32, a byte of each at a time."""
    octets = np.frombuffer(varints + bytes(_MOST_BYTES), np.uint8)
    ends = np.flatnonzero(octets[: len(varints)] < _MORE)
    starts = np.concatenate(([0], ends[:-1] + 1))
    num_more = ends - starts
    numbers = (octets[starts] & 0x7F).astype(np.uint32)
    for nth in range(1, int(num_more.max()) + 1):
        part = (octets[starts + nth] & 0x7F).astype(np.uint32)
        numbers |= (part * (num_more >= nth)).astype(np.uint32) << np.uint32(7 * nth)
    return array("I", numbers.tobytes())


def length_delimited(number: int, payload: bytes) -> bytes:
    """A field that is a message, a string, bytes or packed numbers."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(payload)) + payload


def _payload(field: bytes) -> bytes:
    """Of the one field of a message, whose tag is a byte; empty where there is none."""
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
