"""Token ids as protobuf packs them, so that what is only carried stays bytes. Pure.

protobuf takes a repeated field in number by number: 100,000 ids take it 2 ms each time, and a message that
holds them is packed once to learn its size and once to be sent. Packed they are varints, one after the other,
in a field like a string's (https://protobuf.dev/programming-guides/encoding).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from services.wire.isthmus.v1.generation_pb2 import TokenIds

_MORE = 0x80  # of a varint's bytes, all but the last have it
_LENGTH_DELIMITED = 2  # wire type


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
        return cls(array("I", pb.ids), _payload(pb.SerializeToString()))

    def field(self, number: int) -> bytes:
        """Of a message whose field of that number is `repeated uint32`: to be merged or appended."""
        return length_delimited(number, self.varints) if self.varints else b""


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
