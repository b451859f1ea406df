"""A probe measures how long etcd takes from a router's own put until its own watch shows it.

Its value is a number and, after a blank, the fleet that the router places on: the model it serves. By their
probes routers know how many they are.
"""

import asyncio
import logging

from services.etcd.client import Etcd
from services.etcd.etcd_errors import LeaseNotFound
from services.etcd.lease import BucketLease
from services.index.keys import ClusterKeys
from services.values.errors import IsthmusError

logger = logging.getLogger(__name__)

_GONE_S = 5.0  # A router that stops leaves its probe behind until its lease has lapsed.


class Probe:
    """It puts a number under the router's probe key from time to time. `trouble` says why it could not."""

    def __init__(
        self, etcd: Etcd, keys: ClusterKeys, router: str, *, fleet: str = "", interval_s: float = 1.0
    ) -> None:
        self.trouble: IsthmusError | None = None
        self._etcd = etcd
        self._router = router
        self._fleet = fleet
        self._key = keys.probe(router)
        self._interval_s = interval_s
        self._lease = BucketLease(etcd, life_s=60.0, bucket_s=60.0)
        self._number = 0
        self._put_at: float | None = None  # The one that has not been seen yet was put then.
        self._last_delay_s = 0.0
        self._seen_s: dict[str, float] = {}

    @property
    def delay_s(self) -> float:
        """Return the delay of the last probe seen, or for how long the present one has been under way if that
        is more."""
        under_way_s = 0.0 if self._put_at is None else self._etcd.clock() - self._put_at
        return max(self._last_delay_s, under_way_s)

    def place_among_routers(self) -> tuple[int, int]:
        """Return our place, from 0, among the fleet's routers by name, and how many they are.

        Those count whose probes were seen as late as ours, or nearly; while etcd is away they stay.
        """
        since_s = self._seen_s.get(self._router, 0.0) - _GONE_S
        others = [name for name, seen_s in self._seen_s.items() if seen_s > since_s and name != self._router]
        return sum(name < self._router for name in others), len(others) + 1

    def seen(self, router: str, value: bytes | None) -> None:
        """Note that the watch has shown a probe; None: it is gone."""
        if value is None or value.partition(b" ")[2] != self._fleet.encode():
            self._seen_s.pop(router, None)
            return
        self._seen_s[router] = self._etcd.clock()
        # An older one of ours says nothing of the present delay.
        if router == self._router and self._put_at is not None and value == self._value():
            self._last_delay_s = self._etcd.clock() - self._put_at
            self._put_at = None

    async def run(self) -> None:
        """Put probes for ever. One that is not seen is put again, and counts from its first put."""
        while True:
            try:
                await self._put()
                self.trouble = None
            except IsthmusError as error:
                self.trouble = error
                logger.warning("probe_failed error=%s", error)
            await asyncio.sleep(self._interval_s)

    async def _put(self) -> None:
        if self._put_at is None:
            self._number += 1
            self._put_at = self._etcd.clock()
        try:
            await self._etcd.put(self._key, self._value(), await self._lease.id())
        except LeaseNotFound:
            self._lease.forget()
            raise

    def _value(self) -> bytes:
        return f"{self._number} {self._fleet}".encode()
