"""What one simulated rank stores and evicts, drawn when it is asked for.

A thousand radix trees and ledgers do not fit on two cores; in a cluster each rank has cores of its own.
So here they cost next to nothing, and what etcd and the mirror see is the same.
"""

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.index.hash_ledger import HashLedger
from services.kv.types import CacheEvents

Blocks = NDArray[np.int64]
_RANDOM_BITS = 24


def stamps(now_s: float, count: int, rng: np.random.Generator) -> Blocks:
    """Hashes that say when they were made, to the microsecond."""
    first = int(now_s * 1e6) << _RANDOM_BITS
    return first + rng.integers(0, 1 << _RANDOM_BITS, count)


def stamped_s(block: int) -> float:
    return (block >> _RANDOM_BITS) / 1e6


class SimulatedLedger(HashLedger):
    """`blocks_per_s` new blocks all the time; of more than `capacity` the oldest go."""

    def __init__(self, blocks_per_s: float, capacity: int, clock: Callable[[], float], seed: int) -> None:
        super().__init__()
        self._blocks_per_s = blocks_per_s
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._drawn_s = clock()
        self._ring = stamps(self._drawn_s, capacity, self._rng)  # oldest first

    def __repr__(self) -> str:
        return f"SimulatedLedger(blocks={len(self._ring)})"

    @property
    def has_news(self) -> bool:
        return True  # by the time that it is asked

    def age_s(self, now: float) -> float:
        return now - self._drawn_s

    def record(self, events: CacheEvents, now: float) -> None:
        raise AssertionError("nothing is recorded: it is drawn")

    def take_delta(self, max_hashes: int) -> tuple["array[int]", "array[int]"]:  # type: ignore[override]
        count = min(self._num_due(), max_hashes // 2, len(self._ring))
        # Stamped with the time of the oldest: nothing of the delta is older.
        added = stamps(self._drawn_s, count, self._rng)
        removed, self._ring = self._ring[:count], np.concatenate((self._ring[count:], added))
        self._drawn_s = self._clock()
        return _packed(added), _packed(removed)

    def take_snapshot(self) -> "array[int]":  # type: ignore[override]
        self.take_delta(len(self._ring))
        self.needs_snapshot = False
        return _packed(self._ring)

    def _num_due(self) -> int:
        return int(self._blocks_per_s * (self._clock() - self._drawn_s))


def _packed(blocks: Blocks) -> "array[int]":
    return array("Q", blocks.astype(np.uint64).tobytes())
