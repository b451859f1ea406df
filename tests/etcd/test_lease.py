import asyncio

import pytest

from etcd.real_etcd import client, until
from etcd.silent_member import SilentMember
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import Etcd
from services.etcd.lease import BucketLease, EtcdLease
from services.index.keys import ClusterKeys


async def test_a_lease_lives_on_and_its_keys_go_with_it(etcd: Etcd, keys: ClusterKeys) -> None:
    lease = await EtcdLease.grant(etcd, 3)  # a busy machine may be late for a third of that
    key = keys.prefix + b"a"
    await etcd.put(key, b"", lease.id)
    first_deadline = lease.deadline
    await until(lambda: lease.deadline > first_deadline + lease.ttl_s)  # past its first end
    assert not lease.lost.is_set() and await etcd.get(key) is not None
    await lease.revoke()
    assert lease.lost.is_set() and await etcd.get(key) is None


async def test_a_lease_revoked_behind_our_back_is_lost(etcd: Etcd) -> None:
    lease = await EtcdLease.grant(etcd, 1)
    await etcd.revoke_lease(lease.id)
    await asyncio.wait_for(lease.lost.wait(), 5)
    await lease.revoke()  # harmless


async def test_a_lease_is_not_lost_to_a_member_that_has_yet_to_read_of_it(etcd: Etcd, monkeypatch) -> None:
    open_stream, denied = etcd.connection.open_stream, []

    async def open_forgetful(method):
        stream = await open_stream(method)
        read = stream.read

        async def forgetful(timeout_s):
            response = await read(timeout_s)
            if response is not None and len(denied) < 2:
                denied.append(response)
                response.TTL = 0
            return response

        monkeypatch.setattr(stream, "read", forgetful)
        return stream

    monkeypatch.setattr(etcd.connection, "open_stream", open_forgetful)
    lease = await EtcdLease.grant(etcd, 3)
    before = lease.deadline
    await until(lambda: lease.deadline > before)
    assert len(denied) == 2 and not lease.lost.is_set()
    await lease.revoke()


async def test_when_etcd_is_away_the_deadline_is_the_loss(own_server: EmbeddedEtcd) -> None:
    async with client(own_server.endpoint, timeout_s=2.0) as etcd:
        lease = await EtcdLease.grant(etcd, 1)
        await own_server.kill()
        await asyncio.wait_for(lease.lost.wait(), 30)
        assert etcd.clock() >= lease.deadline


async def test_a_short_outage_loses_nothing(own_server: EmbeddedEtcd) -> None:
    async with client(own_server.endpoint) as etcd:
        lease = await EtcdLease.grant(etcd, 6)
        before = lease.deadline
        await own_server.kill()
        await own_server.start()
        await until(lambda: lease.deadline > before)
        assert not lease.lost.is_set()
        await lease.revoke()


@pytest.mark.long
async def test_a_member_that_falls_silent_is_left_in_time(etcd_endpoint: str) -> None:
    async with (
        SilentMember(etcd_endpoint) as member,
        client(member.endpoint, etcd_endpoint) as etcd,
    ):
        etcd.connection._current = 0
        lease = await EtcdLease.grant(etcd, 6)
        await until(lambda: lease._streams == 1)
        await member.fall_silent()
        await until(lambda: lease._streams == 2 or lease.lost.is_set())
        assert not lease.lost.is_set() and lease.reopened.is_set()
        await lease.revoke()


async def test_a_bucket_shares_one_lease_until_it_is_full(etcd: Etcd) -> None:
    now = 100.0
    etcd.clock = lambda: now
    bucket = BucketLease(etcd, life_s=60, bucket_s=10)
    first = await bucket.id()
    now = 109.9
    assert await bucket.id() == first
    now = 110.0
    second = await bucket.id()
    assert second != first
    bucket.forget()
    assert await bucket.id() != second
