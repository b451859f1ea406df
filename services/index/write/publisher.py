"""A publisher writes to etcd what one rank's radix tree holds.

    COLLECT --events--> DUE --flush interval is over--> WRITE one delta, or a snapshot --ok--> COLLECT
       ^  no lease         ^                           |--etcd away: wait, longer each time--+
       +--- lease lost ----|---------------------------+--etcd full: wait long, write less---+
       +--- another one ---|---------------------------+                                     |
            has the head   +----- then a snapshot: earlier records do not count <------------+
                                                  (or: the last record is not in etcd)       ^

Events are merged in memory at any time, so the engine never waits for etcd, and however long etcd is away, no
more waits to be written than the pool can hold.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from services.etcd.etcd_client import Etcd
from services.etcd.etcd_errors import Backoff, EtcdNoSpace, LeaseNotFound
from services.index.degraded import Degraded, reason_of
from services.index.keys import ClusterKeys
from services.index.write.flush_pace import FlushPace
from services.index.write.prefix_writer import LogLimits, PrefixWriter
from services.index.write.rank_ledger import RankLedger
from services.values.errors import IsthmusError, StaleGeneration
from services.values.kv import CacheEvents
from services.values.rank import RankId

logger = logging.getLogger(__name__)

_NO_LEASE = 0


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    flush_s: float = 0.05  # Events of this period go into one delta.
    writes_per_s: float = 2000.0  # All ranks of the cluster share this budget.
    max_delta_hashes: int = 1 << 16
    max_backoff_s: float = 2.0
    no_space_backoff_s: float = 30.0
    log: LogLimits = field(default_factory=LogLimits)


# What lies below a pool changes slowly, and there may be much of it. So its log is summed up by its length
# alone, before it has more deltas than a reader keeps.
BELOW = PublisherSettings(flush_s=1.0, log=LogLimits(max_deltas=8192))


class Publisher:
    """One event loop owns it; it writes under the lease of `attach`, and sleeps without one."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        rank: RankId,
        settings: PublisherSettings | None = None,
        ledger: RankLedger | None = None,
    ) -> None:
        # Another incarnation has replaced our head; the registration decides which one is later.
        self.disputed = asyncio.Event()
        self.trouble: str | None = None
        self.degraded: Degraded | None = Degraded.NO_LEASE
        self.deltas_written = 0
        self.snapshots_written = 0
        self.failures = 0
        self._etcd = etcd
        self._rank = rank
        self._settings = settings or PublisherSettings()
        self.pace = FlushPace(self._settings.flush_s, self._settings.writes_per_s)
        self._ledger = ledger or RankLedger()
        self._writer = PrefixWriter(etcd, keys, rank, self._settings.log)
        self._wake = asyncio.Event()
        self._lease_id = _NO_LEASE
        self._doubted = False
        self._began_at = 0.0  # This is when the present write began.

    def __repr__(self) -> str:
        return f"Publisher({self._writer!r}, {self._ledger!r}, {self.pace!r})"

    @property
    def lag_s(self) -> float:
        return self._ledger.age_s(self._etcd.clock())

    @property
    def num_blocks(self) -> int:
        return len(self._ledger.held)

    @property
    def num_resumable(self) -> int:
        return len(self._ledger.resumable)

    @property
    def idle(self) -> bool:
        return self._writer.has_log and not self._ledger.has_news

    def attach(self, lease_id: int) -> None:
        """Write under this lease from now on, beginning with a snapshot.

        The registration is ours, so no other incarnation may write.
        """
        self._lease_id = lease_id
        self.disputed.clear()
        self.pace.scatter(self._etcd.clock(), self._etcd.rng.random())
        self._writer.overrule()
        self._start_over()
        self._wake.set()

    def detach(self) -> None:
        """Collect without writing until the next `attach`, because the lease or the registration is lost."""
        self._lease_id = _NO_LEASE
        self.degraded = Degraded.NO_LEASE

    def doubt(self) -> None:
        """Check whether etcd still has the last record: it was away, and may have been restored from a
        backup.

        A rank without news to write would never notice.
        """
        self._doubted = True
        self.pace.scatter(self._etcd.clock(), self._etcd.rng.random())
        self._wake.set()

    def record(self, events: CacheEvents) -> None:
        self._ledger.record(events, self._etcd.clock())
        self._wake.set()

    async def collect(self, events: AsyncIterator[CacheEvents]) -> None:
        async for event in events:
            self.record(event)

    async def publish(self) -> None:
        backoff = Backoff(self._etcd.rng, max_s=self._settings.max_backoff_s)
        while True:
            await self._due()
            await asyncio.sleep(self.pace.wait_s(self._etcd.clock(), self.lag_s))
            try:
                await self.flush()
                backoff.reset()
            except StaleGeneration as error:
                self._note(error)
                self.detach()
                self.disputed.set()
            except EtcdNoSpace as error:
                # Registrations are retried much sooner, so they come first when there is room again.
                self._note(error)
                await asyncio.sleep(self._settings.no_space_backoff_s * self._etcd.rng.uniform(0.5, 1.0))
            except IsthmusError as error:
                self._note(error)
                await backoff.sleep()

    async def flush(self) -> None:
        """Write one delta or one snapshot, if there is news and a lease.

        After an error earlier records do not count: the next flush writes a snapshot. Raises as PrefixWriter
        does.
        """
        if self._doubted:
            await self._look_again()
        lease_id = self._lease_id
        if lease_id == _NO_LEASE or self.idle:
            return
        self._begin()
        try:
            await self._write(lease_id)
        except LeaseNotFound:
            self._start_over()
            if self._lease_id == lease_id:
                self.detach()
            raise
        except BaseException:  # A cancelled write may have happened, too.
            self._start_over()
            raise
        self.trouble = self.degraded = None
        self._wrote()

    def _note(self, error: IsthmusError) -> None:
        self.failures += 1
        self.trouble, self.degraded = str(error), reason_of(error)
        logger.warning("index_write_failed rank=%s lag_s=%.3f error=%s", self._rank, self.lag_s, error)

    async def _look_again(self) -> None:
        self._doubted = False  # This comes first, because a new doubt may arise while we wait.
        try:
            intact = not self._writer.has_log or await self._writer.is_intact()
        except BaseException:
            self._doubted = True
            raise
        if not intact:
            logger.warning("index_write_lost rank=%s", self._rank)
            self._start_over()
        elif self._writer.has_log:
            self.trouble = self.degraded = None

    def _start_over(self) -> None:
        self._writer.start_over()
        self._ledger.forget_reported()

    async def _due(self) -> None:
        while self._lease_id == _NO_LEASE or (self.idle and not self._doubted):
            self._wake.clear()
            await self._wake.wait()

    async def _pause(self) -> None:
        self._wrote()
        await asyncio.sleep(self.pace.wait_s(self._etcd.clock(), math.inf))
        self._begin()

    def _begin(self) -> None:
        self._began_at = self._etcd.clock()
        self.pace.tries(self._began_at)

    def _wrote(self) -> None:
        now = self._etcd.clock()
        self.pace.wrote(now, now - self._began_at)

    def _taken_age_s(self) -> float:
        return self._ledger.taken_age_s(self._etcd.clock())

    async def _write(self, lease_id: int) -> None:
        if self._ledger.needs_snapshot or self._writer.wants_snapshot:
            await self._writer.replace(self._ledger.take_snapshot(), self._taken_age_s, lease_id, self._pause)
            self.snapshots_written += 1
        else:
            changes = self._ledger.take_delta(self._settings.max_delta_hashes)
            await self._writer.append(changes, self._taken_age_s(), lease_id)
            self.deltas_written += 1
        self._ledger.reported()
