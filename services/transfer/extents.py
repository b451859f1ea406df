"""Units of pools become addresses here. An extent is a contiguous piece of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from services.kv.transfer_plan import PageMove
from services.values.errors import PeerFailed, ProtocolError
from services.values.kv import PoolMemory

Extents = NDArray[np.uint64]  # Its shape is (n, 2): address, bytes.
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankPools:
    memories: tuple[PoolMemory, ...]
    unit_bytes: tuple[int, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({memory.kind for memory in self.memories}))

    def of_peer(self, memories: Sequence[PoolMemory]) -> "RankPools":
        """Return a peer's pools of the same units, the last of which it may lack. Raises PeerFailed for none,
        or more."""
        if not 0 < len(memories) <= len(self.memories):
            raise PeerFailed(f"the peer has {len(memories)} pools, we have {len(self.memories)}")
        return RankPools(tuple(memories), self.unit_bytes[: len(memories)])


@dataclass(frozen=True, slots=True)
class CopiedPieces:
    """It has a write's moves as memory: piece i goes from source[i] to target[i], which are equally long."""

    groups: _Numbers
    source: Extents
    target: Extents

    def group_bytes(self, num_groups: int) -> tuple[int, ...]:
        sizes = self.source[:, 1]
        return tuple(int(sizes[self.groups == group].sum()) for group in range(num_groups))


def pieces_of(moves: Sequence[PageMove], source: RankPools, target: RankPools) -> CopiedPieces:
    """Raises ProtocolError where there are no moves, or one is of no group, or leaves a pool."""
    if not moves:
        raise ProtocolError("a write needs at least one page or slot")
    table = np.fromiter(chain.from_iterable(moves), np.int64, len(moves) * len(moves[0]))
    first_source, first_target, num_units, groups = table.reshape(len(moves), -1).T
    if groups.min() < 0 or groups.max() >= len(target.memories):
        raise ProtocolError(f"a move is of no group of the {len(target.memories)} that both have")
    return CopiedPieces(
        groups,
        _extents(groups, first_source, num_units, source),
        _extents(groups, first_target, num_units, target),
    )


def _extents(groups: _Numbers, first: _Numbers, num_units: _Numbers, pools: RankPools) -> Extents:
    pool_units = np.array([memory.num_pages for memory in pools.memories])[groups]
    unit_bytes = np.array(pools.unit_bytes)[groups]
    bases = np.array([memory.base_address for memory in pools.memories], dtype=np.uint64)
    outside = (num_units < 1) | (first < 0) | (first + num_units > pool_units)
    if outside.any():
        raise ProtocolError(f"a move leaves its pool of {pool_units[outside][0]} units")
    extents = np.empty((len(first), 2), dtype=np.uint64)
    extents[:, 0] = first * unit_bytes  # An offset fits int64; an address may not.
    extents[:, 0] += bases[groups]
    extents[:, 1] = num_units * unit_bytes
    return extents
