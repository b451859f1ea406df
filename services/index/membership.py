"""One rank's place in the cluster: lease, registration and published blocks, for as long as it runs.

run --> schema checked --> lease --> registered --> publisher attached --+
                             ^                                           |
                             +---- lease lost: publisher detached -------+     the engine notices none of it
cancelled --> lease revoked: everything of the rank is gone from etcd
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from services.errors import IsthmusError, NoCapacity, NotFound, Unavailable
from services.index.backoff import Backoff
from services.index.etcd import Etcd
from services.index.keys import ClusterKeys
from services.index.lease import Lease
from services.index.publisher import Publisher, PublisherSettings
from services.index.registry import Registration, Schema, check_schema, register
from services.kv.types import CacheEvents

logger = logging.getLogger(__name__)

_REVOKE_TIMEOUT_S = 2.0


class Membership:
    """`registered` is set while the registration is in etcd under a good lease."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        schema: Schema,
        registration: Registration,
        *,
        ttl_s: int = 10,
        publisher_settings: PublisherSettings | None = None,
    ) -> None:
        self.registered = asyncio.Event()
        self.publisher = Publisher(etcd, keys, registration.id, publisher_settings)
        self._etcd = etcd
        self._keys = keys
        self._schema = schema
        self._registration = registration
        self._ttl_s = ttl_s
        self._lease: Lease | None = None

    async def run(self, events: AsyncIterator[CacheEvents]) -> None:
        """Until cancelled; then the rank deregisters. An outage of etcd is waited out.

        Raises an ExceptionGroup with:
            ConfigError: the cluster was set up with another schema, or etcd refuses this user.
            StaleGeneration: a later life of this rank has taken over; this one must stop.
            What `events` raises.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.publisher.collect(events))
                group.create_task(self.publisher.publish())
                group.create_task(self._stay_registered())
        finally:
            self.registered.clear()
            await self._deregister()

    async def _stay_registered(self) -> None:
        backoff = Backoff(self._etcd.rng)
        checked = has_registered = False
        while True:
            try:
                if not checked:
                    await check_schema(self._etcd, self._keys, self._schema)
                    checked = True
                lease = await self._register(take_over=not has_registered)
            except (Unavailable, NoCapacity, NotFound) as error:
                logger.warning("membership.retry rank=%s error=%s", self._registration.id, error)
                await backoff.sleep()
                continue
            has_registered = True
            backoff.reset()
            self.publisher.attach(lease.id)
            self.registered.set()
            await lease.lost.wait()
            self.registered.clear()
            self.publisher.detach()

    async def _register(self, take_over: bool) -> Lease:
        if self._lease is None or self._lease.lost.is_set():
            self._lease = await Lease.grant(self._etcd, self._ttl_s)
        await register(self._etcd, self._keys, self._registration, self._lease.id, take_over=take_over)
        return self._lease

    async def _deregister(self) -> None:
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(_REVOKE_TIMEOUT_S):
                await self._lease.revoke()
        except (IsthmusError, TimeoutError) as error:
            logger.warning("membership.lapses rank=%s error=%s", self._registration.id, error)
