"""A transport writes pages of one rank's pools into another rank's; this is the interface to it.

    register(own pools) --> metadata() ~~ Hello ~~> peer: add_peer(metadata, our pools)
                                                         write(peer, moves) --> Write: poll() ... release()
                                                         remove_peer(peer)
    close()

One side of a pair may be passive: it only registers its pools and sends its metadata. A rank has one pool for
each group of its KvLayout, in that order, and after them its draft model's pool. All of them are registered,
and one write may have moves of several pools.

The functions here turn units of pools into addresses. An extent is a contiguous piece of memory.
"""

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from services.kv.transfer_plan import PageMove
from services.values.errors import PeerFailed, ProtocolError
from services.values.kv import KvPath, PoolMemory

PeerName = NewType("PeerName", str)


class Unsettled(PeerFailed):
    """A write failed, but parts of it may still be under way: bytes of it may land for a while."""


class Write(Protocol):
    """A posted write holds resources until `release`."""

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Return the bytes written to each pool that both sides have, in the order of registration."""

    def poll(self) -> bool:
        """Return True once every byte has landed in the peer's memory; never block.

        Raises:
            PeerFailed: the write failed; some bytes may have landed, and no more will.
            Unsettled: the write failed; some bytes may have landed, and more may.
        """

    def release(self) -> None:
        """Give the transport's resources back. This is called once, after the last poll.

        It returns only when no byte can land any more, unless the write was Unsettled. It waits a few seconds
        for a write that is still under way, because none of our transports can cancel one reliably.

        Raises:
            Unsettled: the write is still under way: bytes may land at any time.
        """


class Transport(Protocol):
    """A transport is one rank's end. Every method but `paths` is called from one thread, which owns it."""

    @property
    def name(self) -> str:
        """Return the name on which both sides must agree: "nixl" or "local"."""

    @property
    def paths(self) -> Sequence[KvPath]:
        """Return the known paths of our writes that have landed. Any thread may call it."""

    def register(self, memories: Sequence[PoolMemory], unit_bytes: Sequence[int]) -> None:
        """Make our pools readable and writable by the transport. This is called once, before anything else.

        Args:
            memories: our pools, by group.
            unit_bytes: the bytes of one unit of each pool, by group.

        Raises:
            ConfigError: the transport cannot reach memory of this kind, or of several kinds at once.
        """

    def metadata(self) -> bytes:
        """Return what a peer needs to write to us, as opaque bytes that are sent in Hello."""

    def add_peer(self, metadata: bytes, memories: Sequence[PoolMemory]) -> PeerName:
        """Add a peer and its pools; adding it again is free.

        Args:
            metadata: what the peer's `metadata` returned.
            memories: the peer's pools, by group, in the order in which we registered ours; the last may lack.

        Returns:
            The name by which `write` and `remove_peer` know it.

        Raises:
            PeerFailed: the metadata is unusable, or the peer cannot be reached.
        """

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer to which no write is under way. An unknown one is ignored."""

    def write(self, peer: PeerName, moves: Sequence[PageMove]) -> Write:
        """Post the moves, from our pools into the peer's pools of the same groups, as one write.

        It may take as long as the copy itself if the transport copies in the caller's thread.

        Raises:
            PeerFailed: the peer is unknown or gone; some bytes may have landed, and no more will.
            Unsettled: the post failed; some bytes may have landed, and more may.
            ProtocolError: there are no moves, or one is of no group or leaves its pool; nothing was written.
        """

    def close(self) -> None:
        """Deregister the pools and end. No method may be called after it."""


Extents = NDArray[np.uint64]  # Its shape is (n, 2); a row is (address, bytes).
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankPools:
    memories: tuple[PoolMemory, ...]
    unit_bytes: tuple[int, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({memory.kind for memory in self.memories}))

    def of_peer(self, memories: Sequence[PoolMemory]) -> "RankPools":
        """Return the peer's pools, which may be fewer than ours. It raises PeerFailed for none, or more."""
        if not 0 < len(memories) <= len(self.memories):
            raise PeerFailed(f"the peer has {len(memories)} pools, we have {len(self.memories)}")
        return RankPools(tuple(memories), self.unit_bytes[: len(memories)])


@dataclass(frozen=True, slots=True)
class CopiedPieces:
    """This has a write's moves as memory: piece i goes from source[i] to target[i], both equally long."""

    groups: _Numbers
    source: Extents
    target: Extents

    def group_bytes(self, num_groups: int) -> tuple[int, ...]:
        sizes = self.source[:, 1]
        return tuple(int(sizes[self.groups == group].sum()) for group in range(num_groups))


def pieces_of(moves: Sequence[PageMove], source: RankPools, target: RankPools) -> CopiedPieces:
    """Return the moves as memory. It raises ProtocolError without moves, or if one leaves the pools."""
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


def map_memory(size_bytes: int) -> mmap.mmap:
    """Map private, page-aligned memory, zeroed on first touch, in huge pages if the kernel has them.

    With huge pages the kernel copies between two processes 1.5 times as fast, because it pins 512 times fewer
    pages.

    Raises:
        OSError: there is not so much address space.
    """
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel may be built without transparent huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
