"""There are two kinds of lease: one that we keep alive, and one that many short-lived keys share.

grant --> HELD --answer, TTL > 0--> HELD (deadline = time of sending + TTL)
            |--stream breaks--> HELD, new stream, until the deadline
            |--answer, TTL <= 0--> HELD, requested again; three such answers in a row: LOST
            |--deadline passes---> LOST        we have no answer, but the lease may be gone
            +--revoke------------> LOST
"""

import asyncio
import contextlib
import logging

from services.etcd.connection import EtcdStream, Method
from services.etcd.etcd_client import Etcd
from services.etcd.etcd_errors import Backoff, LeaseNotFound
from services.values.errors import IsthmusError, Unavailable
from services.wire.etcd import etcd_pb2

logger = logging.getLogger(__name__)

_KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", etcd_pb2.LeaseKeepAliveRequest, etcd_pb2.LeaseKeepAliveResponse
)
_KeepAliveStream = EtcdStream[etcd_pb2.LeaseKeepAliveRequest, etcd_pb2.LeaseKeepAliveResponse]


# A member that has just started, or lags behind, may report a lease as gone because it has not read it yet
# (etcd before 3.5.3: https://github.com/etcd-io/etcd/pull/13690).
_GONE_ANSWERS = 3


class EtcdLease:
    """Keys live under a lease, which `grant` makes; `lost` is set once the lease is gone or may be.

    `reopened` is set each time a new stream has kept the lease alive; the user clears it.
    """

    def __init__(self, etcd: Etcd, lease_id: int, ttl_s: int, deadline: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self.reopened = asyncio.Event()
        self._etcd = etcd
        self._deadline = deadline  # This is a time of etcd.clock.
        self._streams = 0  # This many streams have kept it alive.
        self._gone_answers = 0  # This counts such answers in a row.
        self._task = asyncio.create_task(self._keep_alive())

    @classmethod
    async def grant(cls, etcd: Etcd, ttl_s: int) -> "EtcdLease":
        sent = etcd.clock()
        lease_id, granted_s = await etcd.grant_lease(ttl_s)
        return cls(etcd, lease_id, granted_s, sent + granted_s)

    async def revoke(self) -> None:
        """Revoke the lease, which deletes its keys. Raises Unavailable if they will only lapse later."""
        await self.abandon()
        with contextlib.suppress(LeaseNotFound):
            await self._etcd.revoke_lease(self.id)

    async def abandon(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self.lost.set()

    @property
    def deadline(self) -> float:
        """Return the time of etcd.clock from which its keys may be gone, unless it is kept alive before."""
        return self._deadline

    def _left_s(self) -> float:
        return self._deadline - self._etcd.clock()

    async def _keep_alive(self) -> None:
        backoff = Backoff(self._etcd.rng, max_s=1.0)
        try:
            while self._left_s() > 0:
                try:
                    await self._keep_alive_on_one_stream(backoff)
                except LeaseNotFound:
                    self._gone_answers += 1
                    if self._gone_answers == _GONE_ANSWERS:
                        break
                except IsthmusError as error:
                    logger.warning(
                        "lease_renewal_failed lease_id=%x left_s=%.1f error=%s",
                        self.id,
                        self._left_s(),
                        error,
                    )
                await asyncio.sleep(max(0.0, min(backoff.next_s(), self._left_s())))
            logger.warning("lease_lost lease_id=%x", self.id)
        finally:
            self.lost.set()

    async def _keep_alive_on_one_stream(self, backoff: Backoff) -> None:
        """Raise LeaseNotFound if the lease is reported gone, or the error that broke the stream."""
        try:
            async with asyncio.timeout(self._left_s()):
                stream = await self._etcd.connection.open_stream(_KEEP_ALIVE)
        except TimeoutError:
            raise Unavailable("etcd did not answer before the lease's deadline") from None
        try:
            await self._renew(stream)
            self._streams += 1
            if self._streams > 1:
                self.reopened.set()
            while True:
                backoff.reset()
                await stream.read(self.ttl_s / 3)  # Nothing comes; if the stream breaks, we know at once.
                await self._renew(stream)
        finally:
            stream.close()

    async def _renew(self, stream: _KeepAliveStream) -> None:
        sent = self._etcd.clock()
        await stream.write(etcd_pb2.LeaseKeepAliveRequest(ID=self.id))
        response = await stream.read(max(0.0, min(self.ttl_s / 3, self._left_s())))
        if response is None:
            raise stream.silent(Unavailable("etcd did not answer a keep-alive in time"))
        if response.TTL <= 0:
            raise LeaseNotFound(f"etcd no longer knows the lease {self.id:x}")
        self._gone_answers = 0
        # It counts from the time of sending: the answer may have been under way for long.
        self._deadline = sent + response.TTL


class BucketLease:
    """Many short-lived keys share a lease, so that a million keys do not need a million leases.

    A new one is taken every `bucket_s`; a key put under it lives for `life_s` to `life_s + bucket_s`.
    """

    def __init__(self, etcd: Etcd, *, life_s: float, bucket_s: float) -> None:
        self._etcd = etcd
        self._bucket_s = bucket_s
        self._ttl_s = int(life_s + bucket_s) + 1
        self._lease_id = 0
        self._granted_at: float | None = None

    async def id(self) -> int:
        now = self._etcd.clock()
        if self._granted_at is None or now - self._granted_at >= self._bucket_s:
            self._lease_id, _ = await self._etcd.grant_lease(self._ttl_s)
            self._granted_at = now
        return self._lease_id

    def forget(self) -> None:
        """Grant a new lease next time. Call it after LeaseNotFound."""
        self._granted_at = None
