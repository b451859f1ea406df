"""This is a thin client of etcd's v3 API: keys, transactions and leases. Streams are in lease.py and
watch.py.
"""

import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType

from services.etcd.connection import EtcdConnection, EtcdSettings, Method, Observe, unobserved
from services.etcd.etcd_errors import EtcdCompacted, EtcdTooLarge
from services.wire.etcd import etcd_pb2

_RANGE = Method("/etcdserverpb.KV/Range", etcd_pb2.RangeRequest, etcd_pb2.RangeResponse)
_PUT = Method("/etcdserverpb.KV/Put", etcd_pb2.PutRequest, etcd_pb2.PutResponse)
_TXN = Method("/etcdserverpb.KV/Txn", etcd_pb2.TxnRequest, etcd_pb2.TxnResponse)
_COMPACT = Method("/etcdserverpb.KV/Compact", etcd_pb2.CompactionRequest, etcd_pb2.CompactionResponse)
_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", etcd_pb2.LeaseGrantRequest, etcd_pb2.LeaseGrantResponse)
_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", etcd_pb2.LeaseRevokeRequest, etcd_pb2.LeaseRevokeResponse)
_STATUS = Method("/etcdserverpb.Maintenance/Status", etcd_pb2.StatusRequest, etcd_pb2.StatusResponse)

# Our largest values have 1 MiB, so a page of this many keys stays below the response limit.
_FIRST_PAGE_KEYS = 120
# A page is decoded at once, so it must be small enough not to block the loop.
_MAX_PAGE_KEYS = 1_000
_PAGE_BYTES = 1 << 20
_LIST_ATTEMPTS = 5
logger = logging.getLogger(__name__)
_DIVERGES_BEFORE = (3, 5, 3)


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: bytes
    value: bytes
    mod_revision: int
    lease_id: int = 0  # 0 means none.


@dataclass(frozen=True, slots=True)
class TxnResult:
    succeeded: bool  # Every comparison held.
    revision: int


@dataclass(frozen=True, slots=True)
class ListingPage:
    revision: int
    kvs: list["KeyValue"]
    next_key: bytes | None  # The last page has None.


def prefix_end(prefix: bytes) -> bytes:
    r"""Return the least key greater than every key with this prefix, or b"\0" (etcd's "no end") for none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def put_op(key: bytes, value: bytes, lease_id: int = 0) -> etcd_pb2.RequestOp:
    operation = etcd_pb2.RequestOp()
    put = operation.request_put  # We fill it in place: passing a message would serialize and parse it.
    put.key, put.value, put.lease = key, value, lease_id
    return operation


def delete_range_op(start: bytes, end: bytes) -> etcd_pb2.RequestOp:
    return etcd_pb2.RequestOp(request_delete_range=etcd_pb2.DeleteRangeRequest(key=start, range_end=end))


def unchanged(key: bytes, mod_revision: int) -> etcd_pb2.Compare:
    """Return a comparison that holds while the key's last write is `mod_revision`, or it is absent (0)."""
    compare = etcd_pb2.Compare
    return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=mod_revision)


class Etcd:
    """Every method raises Unavailable if no member answers in time, and otherwise the errors of `rename`.

    Idempotent calls are retried within the deadline. After Unavailable a write may or may not have happened.
    """

    def __init__(
        self,
        settings: EtcdSettings,
        *,
        rng: random.Random,
        observe: Observe = unobserved,
    ) -> None:
        self.clock = time.monotonic
        self.rng = rng
        self.connection = EtcdConnection(settings, rng=rng, observe=observe)

    async def __aenter__(self) -> "Etcd":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.connection.close()

    async def get(self, key: bytes, revision: int = 0) -> KeyValue | None:
        response = await self.connection.unary(_RANGE, etcd_pb2.RangeRequest(key=key, revision=revision))
        return key_value(response.kvs[0]) if response.kvs else None

    async def current_revision(self, key: bytes = b"\0") -> int:
        """Return the store's revision, agreed on by a majority, by a linearizable read of a readable key."""
        request = etcd_pb2.RangeRequest(key=key, count_only=True)
        return (await self.connection.unary(_RANGE, request)).header.revision

    async def snapshot(self, prefix: bytes, page_keys: int = _FIRST_PAGE_KEYS) -> tuple[int, list[KeyValue]]:
        for attempt in range(1, _LIST_ATTEMPTS + 1):
            kvs: list[KeyValue] = []
            try:
                async with aclosing(self.pages(prefix, prefix_end(prefix), page_keys=page_keys)) as pages:
                    async for page in pages:
                        kvs.extend(page.kvs)
                return page.revision, kvs
            except EtcdCompacted:
                # The revision was compacted between two pages, so we begin again at a newer one.
                if attempt == _LIST_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def pages(
        self, start: bytes, end: bytes, revision: int = 0, page_keys: int = _FIRST_PAGE_KEYS
    ) -> AsyncGenerator[ListingPage, None]:
        """Yield the keys in [start, end) at `revision` (0 means now), in at least one page, of about 1 MiB
        each. Raises EtcdCompacted if the revision is compacted in the meantime."""
        next_key: bytes | None = start
        while next_key is not None:
            try:
                page = await self._page(next_key, end, revision, page_keys)
            except EtcdTooLarge:
                page_keys = max(1, page_keys // 4)
                continue
            yield page
            revision, next_key = page.revision, page.next_key
            page_keys = _next_page_keys(page, page_keys)

    async def _page(self, start: bytes, end: bytes, revision: int, page_keys: int) -> ListingPage:
        request = etcd_pb2.RangeRequest(key=start, range_end=end, limit=page_keys, revision=revision)
        response = await self.connection.unary(_RANGE, request)
        kvs = [key_value(kv) for kv in response.kvs]
        next_key = kvs[-1].key + b"\0" if response.more else None
        return ListingPage(revision or response.header.revision, kvs, next_key)

    async def count(self, prefix: bytes) -> int:
        request = etcd_pb2.RangeRequest(
            key=prefix, range_end=prefix_end(prefix), count_only=True, serializable=True
        )
        return (await self.connection.unary(_RANGE, request)).count

    async def put(self, key: bytes, value: bytes, lease_id: int = 0) -> int:
        request = etcd_pb2.PutRequest(key=key, value=value, lease=lease_id)
        return (await self.connection.unary(_PUT, request)).header.revision

    async def txn(
        self,
        compares: Iterable[etcd_pb2.Compare],
        success: Iterable[etcd_pb2.RequestOp],
        failure: Iterable[etcd_pb2.RequestOp] = (),
        *,
        idempotent: bool = False,
    ) -> TxnResult:
        """Run a transaction of at most 128 operations and 1.5 MiB. It is retried if it is `idempotent`."""
        request = etcd_pb2.TxnRequest(compare=compares, success=success, failure=failure)
        response = await self.connection.unary(_TXN, request, idempotent=idempotent)
        return TxnResult(response.succeeded, response.header.revision)

    async def create(self, key: bytes, value: bytes, lease_id: int = 0) -> bool:
        return await self.compare_and_swap(key, value, 0, lease_id)

    async def compare_and_swap(self, key: bytes, value: bytes, mod_revision: int, lease_id: int = 0) -> bool:
        result = await self.txn([unchanged(key, mod_revision)], [put_op(key, value, lease_id)])
        return result.succeeded

    async def grant_lease(self, ttl_s: int) -> tuple[int, int]:
        """Return a lease's id and its granted seconds. Nothing keeps it alive; EtcdLease does."""
        # We retry although each attempt may leave a lease behind: it has no keys and lapses soon.
        response = await self.connection.unary(_GRANT, etcd_pb2.LeaseGrantRequest(TTL=ttl_s))
        return response.ID, response.TTL

    async def revoke_lease(self, lease_id: int) -> None:
        await self.connection.unary(_REVOKE, etcd_pb2.LeaseRevokeRequest(ID=lease_id))

    async def compact(self, revision: int) -> None:
        await self.connection.unary(_COMPACT, etcd_pb2.CompactionRequest(revision=revision, physical=True))

    async def status(self) -> etcd_pb2.StatusResponse:
        return await self.connection.unary(_STATUS, etcd_pb2.StatusRequest())


def _next_page_keys(page: ListingPage, page_keys: int) -> int:
    size_bytes = sum(len(kv.value) for kv in page.kvs)
    fitting = _PAGE_BYTES * len(page.kvs) // max(1, size_bytes)
    return max(_FIRST_PAGE_KEYS, min(fitting, 4 * page_keys, _MAX_PAGE_KEYS))


def key_value(pb: etcd_pb2.KeyValue) -> KeyValue:
    return KeyValue(pb.key, pb.value, pb.mod_revision, pb.lease)


def known_fault(version: str) -> str | None:
    """Return the fault of an etcd of that version ("3.5.1") in a cluster of several members, or None.

    A member of 3.5.0 to 3.5.2 that is killed while it writes can lose entries that it reports as applied.
    From then on it serves other data than the other members, and nothing reports that (etcd issue 13766).
    """
    numbers = re.match(r"3\.5\.(\d+)(?!\d)", version)
    if numbers is None or (3, 5, int(numbers[1])) >= _DIVERGES_BEFORE:
        return None
    return "a member that is killed may lose entries for good, and serves them no more; use 3.5.3 or later"


async def warn_of_version(etcd: Etcd) -> None:
    if etcd.connection.num_endpoints == 1:
        return
    version = (await etcd.status()).version
    if (fault := known_fault(version)) is not None:
        logger.warning("etcd_version_faulty version=%s fault=%s", version, fault)
