"""This module writes one rank's records to etcd so that they cannot be mixed up with another incarnation's.

    NO LOG --replace: the chunks of a new epoch; with the last, in one transaction, head flips to the epoch
       ^      |       and older records are deleted--> LOG --append: log/<seq>, while it is short--> LOG
       |      +-----------------<--- replace: log is long -------------------------------------+
       +--- a write failed, or may have failed; a new lease -----------------------------------+

Every write is a transaction that succeeds only while `head` is the one that we wrote (or, before our first
one, found): if a rank has two incarnations, the later one's head stops the earlier one's writes, whatever
happens to its lease. It also requires that the record before is as we wrote it: an etcd restored from a
backup, whose leases live on, may have the same head but lack later records.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from services.etcd.etcd_client import Etcd, delete_range_op, prefix_end, put_op, unchanged
from services.index.codec import decode_record, encode_delta, encode_head, encode_snapshot
from services.index.keys import ClusterKeys, HeadKey
from services.index.records import (
    HASH_BYTES,
    Hashes,
    PrefixDelta,
    PrefixHead,
    PrefixSnapshot,
    hashes_of,
)
from services.values.errors import IsthmusError, ProtocolError, StaleGeneration
from services.values.kv import CacheEvents
from services.values.rank import RankId
from services.wire.etcd import etcd_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogLimits:
    """A snapshot replaces a log at the length from which a new reader is better off with it.

    The log may grow to twice the snapshot, so that rewriting costs about half as much again as the deltas,
    and a new reader reads about three times what the rank holds. The other limits override this: for a small
    pool `max_deltas` rewrites more and `min_bytes` reads more, for a very large one `max_bytes` rewrites
    more.
    """

    max_deltas: int = 512
    min_bytes: int = 64 << 10
    max_bytes: int = 4 << 20
    max_chunk_hashes: int = (1 << 20) // HASH_BYTES - 64  # With its header a chunk has less than 1 MiB.


class RecordsMoved(IsthmusError):
    """The head or the record before is not as we knew it: read the head, then continue or give up."""


@dataclass(frozen=True, slots=True)
class _Stand:
    """A write requires that the head, and our newest record since, still have these revisions."""

    head_revision: int  # 0 means that there is no head.
    newest: bytes | None = None  # None means that the head is the newest.
    newest_revision: int = 0


@dataclass(slots=True)
class _Log:
    epoch: int
    stand: _Stand
    snapshot_bytes: int
    deltas: int = 0
    size_bytes: int = 0


class PrefixWriter:
    """Every method raises StaleGeneration if a later incarnation has taken over, RecordsMoved, Unavailable,
    EtcdNoSpace or LeaseNotFound. After an error it is unknown what was written: call `start_over`.
    """

    def __init__(self, etcd: Etcd, keys: ClusterKeys, rank: RankId, limits: LogLimits) -> None:
        self._etcd = etcd
        self._keys = keys
        self._rank = rank
        self._limits = limits
        self._log: _Log | None = None
        self._epoch = 0  # We, or before us an earlier incarnation, used this epoch last.
        self._next_seq = 0
        self._has_ruled = False  # A head of ours has been in etcd since the last `overrule`.

    def __repr__(self) -> str:
        return f"PrefixWriter(rank={self._rank}, epoch={self._epoch}, next_seq={self._next_seq})"

    @property
    def has_log(self) -> bool:
        return self._log is not None

    @property
    def wants_snapshot(self) -> bool:
        log, limits = self._log, self._limits
        if log is None or log.deltas >= limits.max_deltas:
            return True
        longest_bytes = min(limits.max_bytes, max(limits.min_bytes, 2 * log.snapshot_bytes))
        return log.size_bytes >= longest_bytes

    def start_over(self) -> None:
        """Discard the log, so that only a snapshot may follow."""
        self._log = None

    def overrule(self) -> None:
        """Treat the next head that is found as an earlier incarnation's."""
        self._has_ruled = False

    async def append(self, changes: CacheEvents, age_s: float, lease_id: int) -> None:
        log = self._log
        assert log is not None, "a delta needs a snapshot to stand on"
        delta = PrefixDelta(
            self._rank.generation,
            log.epoch,
            self._next_seq,
            hashes_of(changes.stored),
            hashes_of(changes.removed),
            age_s,
            hashes_of(changes.resumable_stored),
            hashes_of(changes.resumable_removed),
            hashes_of(changes.files_stored),
            hashes_of(changes.files_removed),
        )
        value = encode_delta(delta)
        put = put_op(self._keys.log(self._rank.key, delta.seq), value, lease_id)
        log.stand = await self._put(put, log.stand)
        self._next_seq += 1
        log.deltas += 1
        log.size_bytes += len(value)

    async def replace(
        self,
        contents: CacheEvents,
        age_s: Callable[[], float],
        lease_id: int,
        pause: Callable[[], Awaitable[None]],
    ) -> None:
        """Write a snapshot of all blocks; `pause` is awaited between chunks.

        `age_s` is called for the head, with which it takes effect.
        """
        # The log since its head is replaced, so the write need not depend on it.
        stand = _Stand(self._log.stand.head_revision if self._log else await self._check_head())
        # Every attempt has a new epoch, so that chunks of a failed one are never mixed in.
        self._epoch += 1
        size = self._limits.max_chunk_hashes
        chunks: list[etcd_pb2.RequestOp] = []
        num_chunks = 0
        for part in _parts(contents, size):
            if chunks:
                stand = await self._put(chunks[0], stand)
                await pause()
            chunks = [self._chunk_op(num_chunks, part, lease_id)]
            num_chunks += 1
        revision = await self._flip(chunks, num_chunks, age_s(), stand, lease_id)
        self._has_ruled = True
        num_hashes = sum(map(len, (contents.stored, contents.resumable_stored, contents.files_stored)))
        self._log = _Log(self._epoch, _Stand(revision), num_hashes * HASH_BYTES)

    async def is_intact(self) -> bool:
        """Return whether etcd has the newest record of our log as we wrote it. Raises Unavailable."""
        assert self._log is not None, "without a log there is no newest record"
        stand = self._log.stand
        found = await self._etcd.get(stand.newest or self._keys.head(self._rank.key))
        return (found.mod_revision if found else 0) == (stand.newest_revision or stand.head_revision)

    def _chunk_op(self, number: int, part: list[Hashes], lease_id: int) -> etcd_pb2.RequestOp:
        snapshot = PrefixSnapshot(self._rank.generation, self._epoch, number, *part)
        key = self._keys.snapshot(self._rank.key, self._epoch, number)
        return put_op(key, encode_snapshot(snapshot), lease_id)

    async def _check_head(self) -> int:
        found = await self._etcd.get(self._keys.head(self._rank.key))
        if found is None:
            return 0
        try:
            head = decode_record(HeadKey(self._rank.key), found.value)
        except ProtocolError as error:
            logger.warning("index_head_overwritten rank=%s error=%s", self._rank, error)
            return found.mod_revision  # No incarnation of this rank can have written that.
        assert isinstance(head, PrefixHead)
        if head.generation == self._rank.generation:
            self._has_ruled = True
        elif self._has_ruled:
            raise StaleGeneration(
                f"another life of rank {self._rank} writes the index now: {head.generation:016x}"
            )
        self._epoch = max(self._epoch, head.epoch)
        return found.mod_revision

    async def _flip(
        self,
        last_chunk: list[etcd_pb2.RequestOp],
        num_chunks: int,
        age_s: float,
        stand: _Stand,
        lease_id: int,
    ) -> int:
        rank, epoch = self._rank.key, self._epoch
        head = PrefixHead(self._rank.generation, epoch, self._next_seq, num_chunks, age_s)
        ours = self._keys.snapshot_epoch(rank, epoch)
        all_snapshots, log = self._keys.snapshot_prefix(rank), self._keys.log_prefix(rank)
        return await self._write(
            [
                *last_chunk,
                put_op(self._keys.head(rank), encode_head(head), lease_id),
                delete_range_op(log, prefix_end(log)),
                delete_range_op(all_snapshots, ours),
                delete_range_op(prefix_end(ours), prefix_end(all_snapshots)),
            ],
            stand,
        )

    async def _put(self, put: etcd_pb2.RequestOp, stand: _Stand) -> _Stand:
        revision = await self._write([put], stand, idempotent=True)
        return replace(stand, newest=put.request_put.key, newest_revision=revision)

    async def _write(
        self, operations: list[etcd_pb2.RequestOp], stand: _Stand, *, idempotent: bool = False
    ) -> int:
        guards = [unchanged(self._keys.head(self._rank.key), stand.head_revision)]
        if stand.newest is not None:
            guards.append(unchanged(stand.newest, stand.newest_revision))
        result = await self._etcd.txn(guards, operations, idempotent=idempotent)
        if not result.succeeded:
            raise RecordsMoved("the head was written by someone else, or etcd has lost what came after it")
        return result.revision


def _parts(contents: CacheEvents, size: int) -> Iterator[list[Hashes]]:
    """Yield the next ones held, resumable and in files, one kind after the other, so many together."""
    kinds = (contents.stored, contents.resumable_stored, contents.files_stored)
    firsts = (0, len(kinds[0]), len(kinds[0]) + len(kinds[1]))
    for start in range(0, sum(map(len, kinds)), size):
        yield [
            hashes_of(kind[max(0, start - first) : max(0, start + size - first)])
            for kind, first in zip(kinds, firsts, strict=True)
        ]
