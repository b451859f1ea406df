"""A simulated rank's stores and evictions are drawn when they are asked for.

A thousand radix trees and ledgers do not fit on two cores; in a cluster each rank has cores of its own.
So here they cost next to nothing, and what etcd and the mirror see is the same.
"""

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.index.write.rank_ledger import RankLedger
from services.values.kv import CacheEvents

Blocks = NDArray[np.int64]
_RANDOM_BITS = 24
# Drawn once for all ranks, and no two alike: drawing costs more than all the rest.
_RANDOM: Blocks = np.random.default_rng(0).permutation(1 << 20)
_RANDOM.flags.writeable = False


def stamps(now_s: float, count: int, seed: int) -> Blocks:
    """Hashes that say when they were made, to the microsecond."""
    start = seed % (len(_RANDOM) - count)
    return (int(now_s * 1e6) << _RANDOM_BITS) + _RANDOM[start : start + count]


def stamped_s(block: int) -> float:
    return (block >> _RANDOM_BITS) / 1e6


def newest_of(blocks: NDArray[np.uint64]) -> tuple[float, int]:
    """The latest stamp, in seconds, and how many blocks bear it."""
    newest = int(blocks.max())
    return stamped_s(newest), int(np.count_nonzero(blocks >> _RANDOM_BITS == newest >> _RANDOM_BITS))


class SimulatedLedger(RankLedger):
    """`blocks_per_s` new blocks all the time; of more than `capacity` the oldest go.

    What is taken has arrays for tuples: to make those would take longer than all the rest.
    """

    def __init__(self, blocks_per_s: float, capacity: int, clock: Callable[[], float], seed: int) -> None:
        super().__init__()
        self._blocks_per_s = blocks_per_s
        self._clock = clock
        self._seed = seed
        self._drawn_s = clock()
        self._ring = self._draw(capacity)
        self._oldest = 0  # where in the ring

    def __repr__(self) -> str:
        return f"SimulatedLedger(blocks={len(self._ring)})"

    @property
    def has_news(self) -> bool:
        return True  # by the time that it is asked

    def age_s(self, now: float) -> float:
        return now - self._drawn_s

    def record(self, events: CacheEvents, now: float) -> None:
        raise AssertionError("nothing is recorded: it is drawn")

    def forget_reported(self) -> None:
        """The changes that a failed write should have reported stay unreported, so the next one is as old."""
        if self._taken_s is not None:
            self._drawn_s = self._taken_s
        super().forget_reported()

    def take_delta(self, max_hashes: int) -> CacheEvents:
        count = min(self._num_due(), max_hashes // 2, len(self._ring))
        # Stamped with the time of the oldest: nothing of the delta is older.
        added, oldest = self._draw(count), self._oldest
        at_end = min(count, len(self._ring) - oldest)
        removed = _packed(self._ring[oldest : oldest + at_end]) + _packed(self._ring[: count - at_end])
        self._ring[oldest : oldest + at_end] = added[:at_end]
        self._ring[: count - at_end] = added[at_end:]
        self._oldest = (oldest + count) % len(self._ring)
        self._taken_s, self._drawn_s = self._drawn_s, self._clock()
        return CacheEvents(_packed(added), removed)  # type: ignore[arg-type]

    def take_snapshot(self) -> CacheEvents:
        self.take_delta(len(self._ring))
        self.needs_snapshot = False
        return CacheEvents(_packed(self._ring), cleared=True)  # type: ignore[arg-type]

    def _draw(self, count: int) -> Blocks:
        self._seed += 7919 * count  # another part of what is drawn for every delta
        return stamps(self._drawn_s, count, self._seed)

    def _num_due(self) -> int:
        return int(self._blocks_per_s * (self._clock() - self._drawn_s))


def _packed(blocks: Blocks) -> "array[int]":
    return array("Q", blocks.tobytes())
