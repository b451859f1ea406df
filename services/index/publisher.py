"""Tells etcd what one rank's radix tree holds.

                 +--------------------------- delta: log/<seq> ---------------------------+
                 v                                                                        |
    SNAPSHOT: chunks of a new epoch, then one transaction: head, old epoch and log away --+
                 ^                                                                        |
                 +-- log too long; a write failed; a new lease; tree cleared -------------+

Every write is a transaction that holds only while `head` is the one that we wrote (or, before our first
one, found): of two lives of a rank the later one's head ends the writing of the earlier one, whatever
its lease says. Events are collected into memory at any time, so the engine never waits for etcd.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.errors import IsthmusError, NoCapacity, NotFound, StaleGeneration, Unavailable
from services.index.backoff import Backoff
from services.index.etcd import Etcd, delete_range_op, prefix_end, put_op, unchanged
from services.index.etcd_errors import EtcdNoSpace, LeaseNotFound
from services.index.hash_ledger import HashLedger
from services.index.keys import ClusterKeys, HeadKey
from services.index.prefix_codec import decode_record, encode_delta, encode_head, encode_snapshot
from services.index.prefix_records import HASH_BYTES, PrefixDelta, PrefixHead, PrefixSnapshot
from services.kv.types import CacheEvents, Generation, RankId

logger = logging.getLogger(__name__)

_NO_LEASE = 0


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    flush_s: float = 0.025  # events of so long go into one delta
    max_flush_s: float = 1.0  # where etcd is slow, at most half of the time is spent writing
    max_log_deltas: int = 512  # then a new snapshot
    max_log_bytes: int = 4 << 20
    max_delta_hashes: int = 1 << 16
    max_chunk_hashes: int = (1 << 20) // HASH_BYTES - 64  # with its header below 1 MiB
    max_backoff_s: float = 2.0
    no_space_backoff_s: float = 30.0


@dataclass(slots=True)
class _Log:
    """The epoch that deltas are appended to. `head_revision`: when our head was written."""

    epoch: int
    head_revision: int
    deltas: int = 0
    size_bytes: int = 0


class _HeadMoved(IsthmusError):
    """The head is not the one that we knew: look at it, then go on or give up."""


class Publisher:
    """Owned by one event loop; writes under the lease that `attach` gave it, sleeps without one."""

    def __init__(
        self, etcd: Etcd, keys: ClusterKeys, rank: RankId, settings: PublisherSettings | None = None
    ) -> None:
        self.trouble: str | None = None
        self.deltas_written = 0
        self.snapshots_written = 0
        self._etcd = etcd
        self._keys = keys
        self._rank = rank
        self._settings = settings or PublisherSettings()
        self._ledger = HashLedger()
        self._wake = asyncio.Event()
        self._lease_id = _NO_LEASE
        self._log: _Log | None = None
        self._epoch = 0  # the last one used, by us or, before us, by an earlier life
        self._next_seq = 0
        self._has_ruled = False  # a head of ours has been in etcd
        self._flush_s = self._settings.flush_s

    def __repr__(self) -> str:
        return (
            f"Publisher(rank={self._rank}, epoch={self._epoch}, next_seq={self._next_seq}, {self._ledger!r})"
        )

    @property
    def lag_s(self) -> float:
        """How long the oldest event has waited to be told."""
        return self._ledger.age_s(self._etcd.clock())

    @property
    def idle(self) -> bool:
        """Everything recorded has been told."""
        return self._log is not None and not self._ledger.has_news

    def attach(self, lease_id: int) -> None:
        """Write under this lease from now on, beginning with a snapshot."""
        self._lease_id = lease_id
        self._start_over()
        self._wake.set()

    def detach(self) -> None:
        """The lease is lost: only collect, until the next `attach`."""
        self._lease_id = _NO_LEASE

    def record(self, events: CacheEvents) -> None:
        """Never blocks."""
        self._ledger.record(events, self._etcd.clock())
        self._wake.set()

    async def collect(self, events: AsyncIterator[CacheEvents]) -> None:
        """Record everything that the engine yields; returns when it ends."""
        async for event in events:
            self.record(event)

    async def publish(self) -> None:
        """Write what is recorded, for ever.

        Raises:
            StaleGeneration: a later life of this rank has taken over; this one must not go on.
        """
        backoff = Backoff(self._etcd.rng, max_s=self._settings.max_backoff_s)
        while True:
            await self._due()
            await asyncio.sleep(self._flush_s)
            try:
                await self.flush()
                backoff.reset()
            except EtcdNoSpace as error:
                self._note(error)
                await asyncio.sleep(self._settings.no_space_backoff_s * self._etcd.rng.uniform(0.5, 1.0))
            except (Unavailable, NoCapacity, NotFound, _HeadMoved) as error:
                self._note(error)
                await backoff.sleep()

    async def flush(self) -> None:
        """Write one delta or one snapshot, if there is news and a lease.

        After an error nothing told counts: the next flush writes a snapshot. Raises StaleGeneration,
        Unavailable, EtcdNoSpace, LeaseNotFound.
        """
        lease_id = self._lease_id
        if lease_id == _NO_LEASE or not (self._ledger.has_news or self._log is None):
            return
        started = self._etcd.clock()
        try:
            await self._write(lease_id)
        except LeaseNotFound:
            self._start_over()
            if self._lease_id == lease_id:
                self.detach()
            raise
        except BaseException:  # a cancelled write, too, may or may not have happened
            self._start_over()
            raise
        self.trouble = None
        took_s = self._etcd.clock() - started
        self._flush_s = min(max(self._settings.flush_s, took_s), self._settings.max_flush_s)

    def _note(self, error: IsthmusError) -> None:
        self.trouble = str(error)
        logger.warning("publisher.retry rank=%s lag_s=%.3f error=%s", self._rank, self.lag_s, error)

    def _start_over(self) -> None:
        self._log = None
        self._ledger.forget_told()

    async def _due(self) -> None:
        while self._lease_id == _NO_LEASE or self.idle:
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, lease_id: int) -> None:
        log = self._log
        if log is None or self._ledger.needs_snapshot or self._is_long(log):
            self._log = await self._write_snapshot(lease_id)
            self.snapshots_written += 1
        else:
            await self._append_delta(log, lease_id)
            self.deltas_written += 1

    def _is_long(self, log: _Log) -> bool:
        return log.deltas >= self._settings.max_log_deltas or log.size_bytes >= self._settings.max_log_bytes

    async def _append_delta(self, log: _Log, lease_id: int) -> None:
        age_s = self.lag_s
        added, removed = self._ledger.take_delta(self._settings.max_delta_hashes)
        delta = PrefixDelta(self._rank.generation, log.epoch, self._next_seq, added, removed, age_s)
        value = encode_delta(delta)
        await self._put(self._keys.log(self._rank.key, delta.seq), value, log.head_revision, lease_id)
        self._next_seq += 1
        log.deltas += 1
        log.size_bytes += len(value)

    async def _write_snapshot(self, lease_id: int) -> _Log:
        head_revision = await self._check_head()
        # A number of its own for every attempt: the chunks of one that failed are never mixed in.
        self._epoch += 1
        hashes = self._ledger.take_snapshot()
        size = self._settings.max_chunk_hashes
        chunks = [hashes[start : start + size] for start in range(0, len(hashes), size)]
        for number, chunk in enumerate(chunks):
            snapshot = PrefixSnapshot(self._rank.generation, self._epoch, number, chunk)
            key = self._keys.snapshot(self._rank.key, self._epoch, number)
            await self._put(key, encode_snapshot(snapshot), head_revision, lease_id)
        return await self._flip(len(chunks), head_revision, lease_id)

    async def _check_head(self) -> int:
        """The revision of the head that is there, 0 for none. Raises StaleGeneration."""
        found = await self._etcd.get(self._keys.head(self._rank.key))
        if found is None:
            return 0
        head = decode_record(HeadKey(self._rank.key), found.value)
        if head.generation == self._rank.generation:
            self._has_ruled = True
        elif self._has_ruled:
            raise StaleGeneration(
                f"another life of rank {self._rank} writes the index now: {_hex(head.generation)}"
            )
        self._epoch = max(self._epoch, head.epoch)
        return found.mod_revision

    async def _flip(self, num_chunks: int, head_revision: int, lease_id: int) -> _Log:
        rank, epoch = self._rank.key, self._epoch
        head = PrefixHead(self._rank.generation, epoch, self._next_seq, num_chunks)
        ours = self._keys.snapshot_epoch(rank, epoch)
        all_snapshots, log = self._keys.snapshot_prefix(rank), self._keys.log_prefix(rank)
        result = await self._etcd.txn(
            [unchanged(self._keys.head(rank), head_revision)],
            [
                put_op(self._keys.head(rank), encode_head(head), lease_id),
                delete_range_op(log, prefix_end(log)),
                delete_range_op(all_snapshots, ours),
                delete_range_op(prefix_end(ours), prefix_end(all_snapshots)),
            ],
        )
        if not result.succeeded:
            raise _HeadMoved("the head was written by someone else")
        self._has_ruled = True
        return _Log(epoch, result.revision)

    async def _put(self, key: bytes, value: bytes, head_revision: int, lease_id: int) -> None:
        guard = unchanged(self._keys.head(self._rank.key), head_revision)
        result = await self._etcd.txn([guard], [put_op(key, value, lease_id)], idempotent=True)
        if not result.succeeded:
            raise _HeadMoved("the head was written by someone else")


def _hex(generation: Generation) -> str:
    return f"{generation:016x}"
