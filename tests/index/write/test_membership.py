"""A rank's registration and lease, from its first day to its last, as mirrors see it."""

import asyncio

import pytest

from etcd.real_etcd import client, running, until
from index.cluster import FakeRank, mirroring, registration
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import Etcd
from services.index.keys import ClusterKeys
from services.index.read.mirror import RankState
from services.values.errors import StaleGeneration
from services.values.rank import RankKey


async def test_a_registration_is_mirrored_whole_and_deregistered_at_the_end(
    etcd: Etcd, keys: ClusterKeys
) -> None:
    its = registration()
    rank = FakeRank(etcd, keys, its)
    changed: list[RankKey] = []
    async with mirroring(etcd, keys) as mirror:
        stop = mirror.subscribe(changed.append)
        async with running(rank.run()):
            await until(lambda: rank.id.key in mirror.ranks)
            view = mirror.ranks[rank.id.key]
            assert (view.registration, view.state, view.registered) == (its, RankState.LIVE, True)
        _, kvs = await etcd.snapshot(keys.prefix)
        assert not [kv for kv in kvs if b"/probe/" not in kv.key and not kv.key.endswith(b"/schema")]
        await until(lambda: mirror.ranks[rank.id.key].state is RankState.SUSPECT)
        mirror.mark_dead(rank.id.key)
        assert mirror.ranks == {} and changed == [rank.id.key] * 3
        stop()


async def test_a_lapsed_lease_makes_suspect_and_only_a_health_check_kills(
    etcd: Etcd, keys: ClusterKeys
) -> None:
    rank = FakeRank(etcd, keys, registration())
    key = rank.id.key
    async with mirroring(etcd, keys) as mirror, running(rank.run()) as (task,):
        rank.store(1, 2, 3)
        await until(lambda: rank.is_mirrored_by(mirror))
        task.cancel()
        await until(lambda: mirror.ranks[key].state is RankState.SUSPECT)
        since_s = mirror.ranks[key].since_s
        assert mirror.index.match_all([1, 2, 9]) == {key: 2}
        mirror.mark_live(key)
        assert mirror.ranks[key].state is RankState.LIVE and mirror.ranks[key].since_s >= since_s
        mirror.mark_dead(key)
        assert (mirror.ranks, mirror.index.match_all([1]), mirror.progress(key).current) == ({}, {}, False)
        mirror.mark_dead(key)
        mirror.mark_live(key)
        assert mirror.ranks == {}


async def test_a_registered_rank_that_fails_a_check_is_suspect_not_forgotten(
    etcd: Etcd, keys: ClusterKeys
) -> None:
    rank = FakeRank(etcd, keys, registration())
    async with mirroring(etcd, keys) as mirror, running(rank.run()):
        rank.store(1)
        await until(lambda: rank.is_mirrored_by(mirror))
        mirror.mark_dead(rank.id.key)
        assert mirror.ranks[rank.id.key].state is RankState.SUSPECT
        assert mirror.index.match_all([1]) == {rank.id.key: 1}


async def test_a_lost_lease_is_replaced_and_everything_is_written_again(
    etcd: Etcd, keys: ClusterKeys
) -> None:
    rank = FakeRank(etcd, keys, registration(), ttl_s=1)
    key = rank.id.key
    async with mirroring(etcd, keys) as mirror, running(rank.run()):
        rank.store(1, 2)
        await until(lambda: rank.is_mirrored_by(mirror))
        states = []
        mirror.subscribe(lambda changed: states.append(mirror.ranks[changed].state))
        lost = await rank.lease_id()
        await etcd.revoke_lease(lost)
        rank.store(3)
        await until(lambda: states == [RankState.SUSPECT, RankState.LIVE])
        await until(lambda: rank.is_mirrored_by(mirror) and mirror.progress(key).current)
        found = await etcd.get(keys.head(key))
        assert found is not None and found.lease_id != lost


async def test_a_rank_that_drains_says_so_and_then_is_gone(etcd: Etcd, keys: ClusterKeys) -> None:
    rank = FakeRank(etcd, keys, registration())
    key = rank.id.key
    async with mirroring(etcd, keys) as mirror, running(rank.run()) as (task,):
        rank.store(1, 2)
        await until(lambda: rank.is_mirrored_by(mirror))
        assert not mirror.ranks[key].draining
        assert await rank.membership.say_draining(True)
        await until(lambda: mirror.ranks[key].draining)
        rank.store(3)  # what runs goes on, and what it holds is told
        await until(lambda: rank.is_mirrored_by(mirror))
        task.cancel()
        await until(lambda: key not in mirror.ranks)
        assert mirror.index.match_all([1, 2]) == {} and not mirror.progress(key).current


async def test_a_rank_that_reads_others_files_since_says_so(etcd: Etcd, keys: ClusterKeys) -> None:
    names = [""]
    rank = FakeRank(etcd, keys, registration(), shared_files=lambda: names[-1])
    key = rank.id.key
    async with mirroring(etcd, keys) as mirror, running(rank.run()):
        await until(lambda: key in mirror.ranks)
        assert mirror.ranks[key].registration.shared_files == ""
        names.append("0123456789abcdef")
        await until(lambda: mirror.ranks[key].registration.shared_files == names[-1])
        assert await rank.membership.say_draining(True)
        await until(lambda: mirror.ranks[key].draining)
        assert mirror.ranks[key].registration.shared_files == names[-1]


async def test_a_rank_that_drains_as_its_lease_is_lost_takes_one_new_lease(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = FakeRank(etcd, keys, registration())
    granted: list[int] = []
    grant = etcd.grant_lease

    async def note(ttl_s: int) -> tuple[int, int]:
        lease_id, granted_s = await grant(ttl_s)
        granted.append(lease_id)
        return lease_id, granted_s

    async with running(rank.run()):
        await until(rank.membership.registered.is_set)
        lease = rank.membership._lease
        assert lease is not None
        monkeypatch.setattr(etcd, "grant_lease", note)
        lease.lost.set()
        assert await rank.membership.say_draining(True)
        await until(lambda: rank.membership.registered.is_set() and rank.membership.publisher.idle)
        await lease.abandon()
        assert len(granted) == 1
        found = await etcd.get(keys.registration(rank.id.key))
        assert found is not None and found.lease_id == granted[0]


async def test_a_rank_that_drains_is_killed_and_started_again(etcd: Etcd, keys: ClusterKeys) -> None:
    old, new = (FakeRank(etcd, keys, registration(generation=number)) for number in (1, 2))
    async with mirroring(etcd, keys) as mirror, running(old.run()) as (task,):
        old.store(*range(50))
        await until(lambda: old.is_mirrored_by(mirror))
        assert await old.membership.say_draining(True)
        async with running(new.run()):  # under the same name, before the old lease is gone
            await until(lambda: mirror.ranks[new.id.key].registration.id == new.id)
            assert mirror.index.match_all([0, 1]) == {} and not mirror.ranks[new.id.key].draining
            task.cancel()
            new.store(0)
            await until(lambda: new.is_mirrored_by(mirror))
            assert mirror.index.match_all([0, 1]) == {new.id.key: 1}


async def test_with_etcd_away_nobody_is_told_of_draining_and_it_ends_all_the_same(
    own_server: EmbeddedEtcd,
) -> None:
    async with client(own_server.endpoint, timeout_s=0.5) as etcd:
        rank = FakeRank(etcd, ClusterKeys("c"), registration())
        async with running(rank.run()):
            await until(rank.membership.registered.is_set)
            await own_server.kill()
            assert not await rank.membership.say_draining(True)


async def test_a_torn_registration_and_head_of_its_own_are_written_over(
    etcd: Etcd, keys: ClusterKeys
) -> None:
    rank = FakeRank(etcd, keys, registration(), ttl_s=1)
    async with mirroring(etcd, keys) as mirror, running(rank.run()):
        await until(lambda: rank.is_mirrored_by(mirror))
        lease_id = await rank.lease_id()
        await etcd.put(keys.head(rank.id.key), b"\xff")
        await etcd.put(keys.registration(rank.id.key), b"\xff")
        await etcd.revoke_lease(lease_id)
        rank.store(1)
        await until(lambda: rank.is_mirrored_by(mirror) and mirror.torn_values == 2)


@pytest.mark.long
async def test_a_new_life_takes_over_and_the_old_one_is_told(etcd: Etcd, keys: ClusterKeys) -> None:
    # Should the lease of the new one lapse, where all stands still, the old one would take its place again.
    old, new = (FakeRank(etcd, keys, registration(generation=number), ttl_s=2) for number in (1, 2))
    async with (
        mirroring(etcd, keys) as mirror,
        running(old.run(), ends_with=(ExceptionGroup,)) as (old_task,),
    ):
        old.store(1, 2, 3)
        await until(lambda: old.is_mirrored_by(mirror))
        async with running(new.run()):
            new.store(7)
            await until(lambda: new.is_mirrored_by(mirror))
            old.store(4)  # the old one is still there, and its lease is good
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(old_task, 60)
            assert raised.group_contains(StaleGeneration)
            # Its lease is revoked by now, and the new life has lost nothing by that.
            new.store(8)
            await until(lambda: new.is_mirrored_by(mirror))
            assert mirror.ranks[new.id.key].registration.id == new.id
            assert mirror.ranks[new.id.key].state is RankState.LIVE


async def test_an_old_life_that_wakes_up_does_not_come_back(etcd: Etcd, keys: ClusterKeys) -> None:
    old, new = (FakeRank(etcd, keys, registration(generation=number), ttl_s=1) for number in (1, 2))
    async with (
        mirroring(etcd, keys) as mirror,
        running(old.run(), ends_with=(ExceptionGroup,)) as (old_task,),
    ):
        await until(lambda: old.is_mirrored_by(mirror))
        lease_id = await old.lease_id()
        async with running(new.run()):
            await until(lambda: new.is_mirrored_by(mirror))
            await etcd.revoke_lease(lease_id)  # it notices, and wants to register again
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(old_task, 10)
            assert raised.group_contains(StaleGeneration, match="another life")
            assert mirror.ranks[new.id.key].registration.id == new.id
