"""The transport boundary: how pages get from one rank's pool into another's.

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
    """A posted write. It holds resources until `release`."""

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of each pool that both sides have, in the order in which they were registered."""

    def poll(self) -> bool:
        """True once every byte has landed in the peer's memory; never blocks.

        Raises:
            PeerFailed: the write failed; bytes may have landed in part, and no more will.
            Unsettled: likewise, but more may.
        """

    def release(self) -> None:
        """Give the transport's resources back; called once, after the last poll.

        Returns only when no byte can land any more, unless the write was Unsettled. One still under way is
        waited for, a few seconds at most, for no transport of ours can be trusted to cancel one.

        Raises:
            Unsettled: it is under way still: bytes may land at any time.
        """


class Transport(Protocol):
    """One rank's end. Every method is called from one thread, which owns it."""

    @property
    def name(self) -> str:
        """What both sides must agree on: "nixl" or "local"."""

    @property
    def paths(self) -> Sequence[KvPath]:
        """By what our writes that have landed went, as far as that is known. Any thread may ask."""

    def register(self, memories: Sequence[PoolMemory], unit_bytes: Sequence[int]) -> None:
        """Make our pools readable and writable by the transport. Called once, before all else.

        Both by group; unit i of a pool is unit_bytes long.

        Raises:
            ConfigError: the transport cannot reach memory of this kind, or of several kinds at once.
        """

    def metadata(self) -> bytes:
        """What a peer needs to write to us: opaque, carried in Hello."""

    def add_peer(self, metadata: bytes, memories: Sequence[PoolMemory]) -> PeerName:
        """Learn a peer and its pools: those that we registered, the last ones of which it may lack. Adding it
        again is free.

        Raises:
            PeerFailed: the metadata is unusable, or the peer cannot be reached.
        """

    def remove_peer(self, peer: PeerName) -> None:
        """Forget a peer to which no write is under way. An unknown one is ignored."""

    def write(self, peer: PeerName, moves: Sequence[PageMove]) -> Write:
        """Post the moves, from our pools into the peer's of the same groups, as one write.

        May take as long as the copy itself where the transport copies in the caller's thread.

        Raises:
            PeerFailed: the peer is unknown or gone; bytes may have landed in part, and no more will.
            Unsettled: likewise, but more may.
            ProtocolError: there are no moves, or one is of no group or leaves its pool; nothing was
                written.
        """

    def close(self) -> None:
        """Deregister and end; nothing can be called after."""
