"""The transport boundary says how pages get from one rank's pool into another's.

    register(own pools) --> metadata() ~~ Hello ~~> peer: add_peer(metadata, our pools)
                                                         write(peer, moves) --> Write: poll() ... release()
                                                         remove_peer(peer)
    close()

One side of a pair may be passive: it only registers, and hands its metadata out. A rank has a pool for each
group of its KvLayout, in that order, and behind them its draft model's; all of them are registered, and moves
of several may go in one write.
"""

from collections.abc import Sequence
from typing import NewType, Protocol

from services.kv.transfer_plan import PageMove
from services.values.errors import PeerFailed
from services.values.kv import PoolMemory
from services.values.kv_path import KvPath

PeerName = NewType("PeerName", str)


class Unsettled(PeerFailed):
    """A write failed, and parts of it may be under way still: bytes of it may land for a while."""


class Write(Protocol):
    """A posted write holds resources until `release`."""

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each pool that both sides have, in the order in which they were registered."""

    def poll(self) -> bool:
        """Return True once every byte has landed in the peer's memory; never block.

        Raises:
            PeerFailed: the write failed; bytes may have landed in part, and no more will.
            Unsettled: likewise, but more may.
        """

    def release(self) -> None:
        """Give the transport's resources back; it is called once, after the last poll.

        It returns only when no byte can land any more, unless the write was Unsettled. A write still under
        way is waited for, a few seconds at most, for no transport of ours can be trusted to cancel one.

        Raises:
            Unsettled: it is under way still: bytes may land at any time.
        """


class Transport(Protocol):
    """A transport is one rank's end. Every method is called from one thread, which owns it."""

    @property
    def name(self) -> str:
        """Return what both sides must agree on: "nixl" or "local"."""

    @property
    def paths(self) -> Sequence[KvPath]:
        """Return by which paths our writes that have landed went, as far as that is known. Any thread may
        ask."""

    def register(self, memories: Sequence[PoolMemory], unit_bytes: Sequence[int]) -> None:
        """Make our pools readable and writable by the transport; it is called once, before all else.

        Args:
            memories: our pools, by group.
            unit_bytes: the bytes of one unit of each pool, likewise.

        Raises:
            ConfigError: the transport cannot reach memory of this kind, or of several kinds at once.
        """

    def metadata(self) -> bytes:
        """Return what a peer needs to write to us: opaque bytes, sent in Hello."""

    def add_peer(self, metadata: bytes, memories: Sequence[PoolMemory]) -> PeerName:
        """Learn a peer and its pools, the last of which it may lack; adding it again is free.

        Args:
            metadata: what the peer's `metadata` returned.
            memories: the peer's pools, by group, in the order in which we registered ours.

        Returns:
            The name by which `write` and `remove_peer` know it.

        Raises:
            PeerFailed: the metadata is unusable, or the peer cannot be reached.
        """

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer to which no write is under way. An unknown one is ignored."""

    def write(self, peer: PeerName, moves: Sequence[PageMove]) -> Write:
        """Post the moves, from our pools into the peer's of the same groups, as one write.

        It may take as long as the copy itself where the transport copies in the caller's thread.

        Raises:
            PeerFailed: the peer is unknown or gone; bytes may have landed in part, and no more will.
            Unsettled: likewise, but more may.
            ProtocolError: there are no moves, or one is of no group or leaves its pool; nothing was written.
        """

    def close(self) -> None:
        """Deregister and end; nothing can be called after."""
