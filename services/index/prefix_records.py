"""What a rank writes about its blocks, as values, and packed hashes. Pure. See index.proto."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from services.errors import ProtocolError
from services.kv.types import Generation

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class PrefixHead:
    """Names the snapshot that counts. It holds the effect of every delta with seq < base_seq."""

    generation: Generation
    epoch: int
    base_seq: int
    snapshot_chunks: int


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """Chunk `chunk` of the snapshot of one epoch."""

    generation: Generation
    epoch: int
    chunk: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixDelta:
    """`added` and `removed` have nothing in common. `age_s`: how long the oldest event in it waited."""

    generation: Generation
    epoch: int
    seq: int
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    age_s: float = 0.0


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """64-bit hashes, 8 bytes each, little-endian."""
    return _little_endian(array("Q", hashes)).tobytes()


def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """Raises ProtocolError when the bytes are not whole hashes."""
    if len(packed) % HASH_BYTES:
        raise ProtocolError(f"packed hashes of {len(packed)} bytes are torn")
    hashes = array("Q")
    hashes.frombytes(packed)
    return tuple(_little_endian(hashes))


def _little_endian(hashes: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes
