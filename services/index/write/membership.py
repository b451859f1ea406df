"""A membership is one rank's place in the cluster: lease, registration and published blocks, while it runs.

run --> schema checked --> lease --> registered --> publisher attached <--drain--> registered as draining
             ^                                            |                             |
             +--- lease lost, or another incarnation publishes: publisher detached, ----+
                        the engine notices nothing
cancelled --> lease revoked: everything of the rank is gone from etcd

Once etcd has accepted our registration, none of its errors ends the rank: we always try again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from services.etcd.etcd_client import Etcd
from services.etcd.etcd_errors import Backoff
from services.etcd.lease import EtcdLease
from services.index.joining import Schema, check_schema, register, registered
from services.index.keys import ClusterKeys
from services.index.write.publisher import BELOW, Publisher, PublisherSettings
from services.index.write.rank_ledger import RankLedger
from services.kv.ticket import difference
from services.process.events import first_of
from services.values.adapter import Adapter
from services.values.errors import ConfigError, IsthmusError, StaleGeneration, Unavailable
from services.values.kv import CacheEvents
from services.values.rank_reports import PULLS, Registration

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
_COUNT_INTERVAL_S = 30.0
# A key's owner may have ended, but a new leader of etcd restarts the time of every lease.
_LEASES_TO_WAIT = 3.0


class Membership:
    """`registered` is set while the registration is in etcd under a valid lease."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        schema: Schema,
        registration: Registration,
        *,
        ttl_s: int = 10,
        publisher_settings: PublisherSettings | None = None,
        ledger: RankLedger | None = None,
        below_ledger: RankLedger | None = None,
        with_tiers: bool = False,
        shared_files: Callable[[], str] | None = None,
    ) -> None:
        """Set `with_tiers` for a rank that also publishes what lies below its pool. The ledgers know what it
        holds already. `shared_files` tells what of the registration may come later."""
        self.registered = asyncio.Event()
        self.lease_losses = 0
        self.publisher = Publisher(etcd, keys, registration.id, publisher_settings, ledger)
        self.below: Publisher | None = None
        if with_tiers:
            writes_per_s = (publisher_settings or PublisherSettings()).writes_per_s
            settings = replace(BELOW, writes_per_s=writes_per_s)
            self.below = Publisher(etcd, keys.below, registration.id, settings, below_ledger)
        self.publishers = [each for each in (self.publisher, self.below) if each is not None]
        self._etcd = etcd
        self._keys = keys
        self._schema = schema
        self._registration = registration
        self._shared_files = shared_files or (lambda: registration.shared_files)
        self._told_files = ""
        self._ttl_s = ttl_s
        self._lease: EtcdLease | None = None
        self._registering = asyncio.Lock()

    async def run(
        self, events: AsyncIterator[CacheEvents], below_events: AsyncIterator[CacheEvents] | None = None
    ) -> None:
        """Stay registered until cancelled; then deregister. An outage of etcd is waited out, however long.

        Raises an ExceptionGroup with:
            ConfigError: At the start the cluster has another schema, or etcd refuses this user.
            StaleGeneration: A later incarnation of this rank has taken over; this one must stop.
            Any error that `events` raises.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.publisher.collect(events))
                if self.below is not None and below_events is not None:
                    group.create_task(self.below.collect(below_events))
                for publisher in self.publishers:
                    group.create_task(publisher.publish())
                group.create_task(self._stay_registered())
                group.create_task(self._keep_current())
        finally:
            self.registered.clear()
            await self._deregister()

    async def say_draining(self, draining: bool) -> bool:
        """Report to routers whether this rank refuses new requests; its blocks stay published.

        Returns False if etcd could not be written.
        """
        return await self._say(replace(self._registration, draining=draining))

    async def say_adapters(self, adapters: tuple[Adapter, ...]) -> bool:
        """Report to routers what this rank has loaded. Returns False if etcd could not be written."""
        return await self._say(replace(self._registration, adapters=adapters))

    async def _say(self, registration: Registration) -> bool:
        self._registration = registration
        if not self.registered.is_set():
            return False  # The next registration reports it, if there is one.
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._register(take_over=False)
        except (IsthmusError, TimeoutError) as error:
            logger.warning(
                "rank_change_untold rank=%s draining=%s adapters=%d error=%r",
                registration.id,
                registration.draining,
                len(registration.adapters),
                error,
            )
            return False
        return True

    async def successors(self) -> list[Registration]:
        """Return the ranks that may take over what this one has cached: they pull, and have its layout.
        Raises Unavailable when etcd does not answer in time."""
        layout = self._registration.layout
        ranks = await self.others_of_role()
        return [rank for rank in ranks if PULLS in rank.capabilities and not difference(rank.layout, layout)]

    async def others_of_role(self) -> list[Registration]:
        """Return the other ranks of this role and model that take requests. Raises as `successors`."""
        own = self._registration
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                ranks = await registered(self._etcd, self._keys)
        except TimeoutError as error:
            raise Unavailable("etcd does not answer") from error
        return [
            rank
            for rank in ranks
            if (rank.role, rank.model) == (own.role, own.model)
            and rank.id.key != own.id.key
            and not rank.draining
        ]

    async def _stay_registered(self) -> None:
        backoff = Backoff(self._etcd.rng)
        checked = has_registered = False
        foreign_since_s: float | None = None
        while True:
            try:
                if not checked:
                    await check_schema(self._etcd, self._keys, self._schema)
                    checked = True
                lease = await self._register(take_over=not has_registered)
            except StaleGeneration as error:
                # In an etcd restored from a backup that incarnation may have ended long ago. Then its key
                # disappears with its lease; a rank must not end because of etcd.
                now_s = self._etcd.clock()
                if foreign_since_s is None:
                    foreign_since_s = now_s
                    logger.warning("registration_foreign rank=%s error=%s", self._registration.id, error)
                if not has_registered or now_s - foreign_since_s > self._lease_lapses_within_s():
                    raise
                await asyncio.sleep(self._ttl_s / 3)
                continue
            except IsthmusError as error:
                if isinstance(error, ConfigError) and not has_registered:
                    raise
                foreign_since_s = None  # While etcd is away no lease lapses.
                logger.warning("registration_failed rank=%s error=%s", self._registration.id, error)
                await backoff.sleep()
                continue
            if not has_registered:
                # All ranks may be starting; knowing their number spreads their first writes.
                await self._count_ranks()
            has_registered, foreign_since_s = True, None
            backoff.reset()
            for publisher in self.publishers:
                publisher.attach(lease.id)
            self.registered.set()
            await self._lost_or_disputed(lease)
            self.registered.clear()
            for publisher in self.publishers:
                publisher.detach()
            checked = False  # If etcd lost the lease, it may have lost everything.

    async def _lost_or_disputed(self, lease: EtcdLease) -> None:
        ends = (lease.lost, *(publisher.disputed for publisher in self.publishers))
        while not any(event.is_set() for event in ends):
            await first_of(*ends, lease.reopened)
            if lease.reopened.is_set():
                lease.reopened.clear()
                for publisher in self.publishers:  # This etcd may have been restored from a backup.
                    publisher.doubt()
        self.lease_losses += lease.lost.is_set()

    def _lease_lapses_within_s(self) -> float:
        # etcd may grant more than was requested, and then granted as much to the other incarnation.
        granted_s = self._lease.ttl_s if self._lease else 0
        return _LEASES_TO_WAIT * max(self._ttl_s, granted_s)

    async def _register(self, take_over: bool) -> EtcdLease:
        # A drain while a lease is lost would otherwise grant two leases, and keep one alive for ever.
        async with self._registering:
            if self._lease is None or self._lease.lost.is_set():
                self._lease = await EtcdLease.grant(self._etcd, self._ttl_s)
            told = replace(self._registration, shared_files=self._shared_files())
            await register(self._etcd, self._keys, told, self._lease.id, take_over=take_over)
            self._told_files = told.shared_files
            return self._lease

    async def _keep_current(self) -> None:
        """Update the publishers' number of ranks, which share the write budget, and what others know of ours.

        This happens often at first, because ranks tend to start together.
        """
        backoff = Backoff(self._etcd.rng, first_s=1.0, max_s=_COUNT_INTERVAL_S)
        while True:
            await self.registered.wait()
            await self._count_ranks()
            if self._shared_files() != self._told_files:
                await self._say(self._registration)
            await backoff.sleep()

    async def _count_ranks(self) -> None:
        try:
            num_ranks = max(1, await self._etcd.count(self._keys.registrations))
            for publisher in self.publishers:
                publisher.pace.num_ranks = num_ranks
        except IsthmusError as error:
            logger.debug("rank_count_failed rank=%s error=%s", self._registration.id, error)

    async def _deregister(self) -> None:
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._lease.revoke()
        except (IsthmusError, TimeoutError) as error:
            logger.warning("lease_revoke_failed rank=%s error=%r", self._registration.id, error)
