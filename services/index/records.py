"""A rank writes these records about its blocks, with values and packed hashes. The module is pure. See
index.proto.

By their ages an index knows how far it is behind, without comparing the clocks of two hosts:

an event happens -- age: on the rank's clock --> its delta is written -- delay: on the router's --> seen
"""

import sys
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from services.values.errors import ProtocolError
from services.values.rank import Generation

HASH_BYTES = 8
_BIG_ENDIAN = sys.byteorder == "big"

# Millions of 64-bit hashes wait in such arrays, in 8 bytes each. They are never changed in place.
Hashes: TypeAlias = "array[int]"  # The typecode is "Q".


def hashes_of(blocks: Iterable[int] = ()) -> Hashes:
    return array("Q", blocks)


@dataclass(frozen=True, slots=True)
class PrefixHead:
    """A head names the valid snapshot, which has the effect of every delta with seq < base_seq.

    `age_s` is how long the oldest event waited that only the snapshot reports.
    """

    generation: Generation
    epoch: int
    base_seq: int
    snapshot_chunks: int
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    generation: Generation
    epoch: int
    chunk: int
    hashes: Hashes
    resumable: Hashes = field(default_factory=hashes_of)
    files: Hashes = field(default_factory=hashes_of)


@dataclass(frozen=True, slots=True)
class PrefixDelta:
    """`added` and `removed` have no hash in common, and neither have the resumable ones, nor those in files.

    `age_s` is how long the oldest event in it waited.
    """

    generation: Generation
    epoch: int
    seq: int
    added: Hashes = field(default_factory=hashes_of)
    removed: Hashes = field(default_factory=hashes_of)
    age_s: float = 0.0
    resumable_added: Hashes = field(default_factory=hashes_of)
    resumable_removed: Hashes = field(default_factory=hashes_of)
    files_added: Hashes = field(default_factory=hashes_of)
    files_removed: Hashes = field(default_factory=hashes_of)


def pack_hashes(hashes: Hashes) -> bytes:
    # Each hash has 8 bytes, little-endian.
    return _swapped(hashes).tobytes() if _BIG_ENDIAN else hashes.tobytes()


def unpack_hashes(packed: bytes) -> Hashes:
    if len(packed) % HASH_BYTES:
        raise ProtocolError(f"packed hashes of {len(packed)} bytes are torn")
    hashes = array("Q", packed)
    return _swapped(hashes) if _BIG_ENDIAN else hashes


def _swapped(hashes: Hashes) -> Hashes:
    swapped = hashes[:]
    swapped.byteswap()
    return swapped


class Staleness:
    """This keeps the greatest age reported in the last `window_s`. Times are seconds on one clock."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        # It holds (time of the report, age), with falling ages.
        self._ages: deque[tuple[float, float]] = deque()

    def reported(self, age_s: float, now: float) -> None:
        """Note that a delta or snapshot was applied whose oldest event was `age_s` old when written."""
        while self._ages and self._ages[-1][1] <= age_s:
            self._ages.pop()
        self._ages.append((now, age_s))

    def age_s(self, now: float) -> float:
        """Return the greatest age; 0 without recent reports.

        In that case nothing has changed, or the connection is lost, which the probe's delay shows.
        """
        while self._ages and self._ages[0][0] < now - self._window_s:
            self._ages.popleft()
        return self._ages[0][1] if self._ages else 0.0
