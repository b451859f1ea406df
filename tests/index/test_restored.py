"""An etcd that was restored from a backup knows lives that have ended, and not what came after them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from etcd.etcd_backup import restore, save
from etcd.real_etcd import FAST, client, running, until
from index.cluster import FakeRank, mirroring, registration
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import Etcd
from services.index.keys import ClusterKeys
from services.index.pins import PinSettings, PinWriter
from services.index.read.mirror import Mirror, RankState
from services.index.write.publisher import PublisherSettings
from services.values.rank import Generation, RankId

pytestmark = pytest.mark.long

KEYS = ClusterKeys("c")
HOME = RankId("d1", 0, Generation(1))
TTL_S = 2


def rank_of(etcd: Etcd, worker: str, generation: int) -> FakeRank:
    return FakeRank(etcd, KEYS, registration(worker, generation), TTL_S)


@asynccontextmanager
async def killed_at_the_end(rank: FakeRank) -> AsyncIterator["asyncio.Task[None]"]:
    """It runs; then it is gone without a word: its lease is left to lapse."""
    task = asyncio.create_task(rank.run())
    try:
        yield task
    finally:
        lease = rank.membership._lease
        assert lease is not None
        await lease.abandon()
        rank.membership._lease = None  # nothing to revoke
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.long
async def test_ranks_and_routers_find_their_way_back_and_none_of_them_ends(tmp_path: Path) -> None:
    """d0 has begun a new life since the backup, d1 has lived on, d2 has ended, d3 has come."""
    backup = tmp_path / "backup"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedEtcd(tmp_path / "etcd", extra_arguments=FAST))
        etcd, reader = [
            await stack.enter_async_context(client(server.endpoint, timeout_s=1.0)) for _ in range(2)
        ]
        first = await stack.enter_async_context(mirroring(reader, KEYS, "r0"))
        second = await stack.enter_async_context(mirroring(etcd, KEYS, "r1"))
        both = (first, second)
        d0, d1, d2, d3 = (
            rank_of(etcd, worker, number) for worker, number in (("d0", 2), ("d1", 1), ("d2", 1), ("d3", 1))
        )
        pins = PinWriter(etcd, KEYS, first.known_pin, PinSettings(gather_s=0.001))
        await stack.enter_async_context(running(pins.run()))
        live = await stack.enter_async_context(running(d1.run()))
        async with killed_at_the_end(rank_of(etcd, "d0", 1)) as _, killed_at_the_end(d2):
            d1.store(*range(100))
            d1.resume(10, 20, 99)
            d2.store(500, 501)
            d2.resume(501)
            await until(lambda: all(m.index.match_all([500, 501]) == {d2.id.key: 2} for m in both))
            await until(lambda: all(d1.is_mirrored_by(m) and len(m.ranks) == 3 for m in both))
            pins.pin("old", HOME)
            await until(lambda: all(m.pin("old") for m in both))
            await save(server, backup)
        live += await stack.enter_async_context(running(d0.run(), d3.run()))
        for number in range(20):  # epochs and sequence numbers that the backup has not seen
            d0.store(number)
            d1.store(1000 + number)
            d1.evict(number)
            d3.store(2000 + number)
            d1.resume(99, 1000 + number)
            d3.resume(2000, 2000 + number)
            await asyncio.sleep(0.01)
        pins.pin("new", HOME)
        await until(lambda: all(m.pin("new") for m in both))
        await until(lambda: all(rank.is_mirrored_by(m) for rank in (d0, d1, d3) for m in both))
        for mirror in both:
            await until(lambda m=mirror: m.ranks[d2.id.key].state is RankState.SUSPECT)
            mirror.mark_dead(d2.id.key)
            assert d2.id.key not in mirror.ranks
        await server.kill()
        await restore(server, backup)
        await server.start()
        for rank in (d0, d1, d3):
            rank.store(3000)
        d3.resume(2005)
        await until(lambda: all(reconciled(m, [d0, d1, d3]) for m in both), timeout_s=30.0)
        for mirror in both:
            # It was in the backup, and asked again it does not answer.
            await until(lambda m=mirror: not m.ranks[d2.id.key].registered)
            mirror.mark_dead(d2.id.key)
            assert set(mirror.ranks) == {rank.id.key for rank in (d0, d1, d3)}
            assert mirror.index.match_all([500]) == {} and mirror.index.match_all([0]) == {d0.id.key: 1}
            assert mirror.pin("old") and mirror.torn_values == 0
        pins.pin("newer", HOME)
        await until(lambda: all(m.pin("newer") for m in both))
        assert not any(task.done() for task in live)


def reconciled(mirror: Mirror, ranks: list[FakeRank]) -> bool:
    return mirror.degraded is None and all(
        rank.is_mirrored_by(mirror)
        and mirror.ranks[rank.id.key].state is RankState.LIVE
        and rank.membership.registered.is_set()
        for rank in ranks
    )


async def test_a_head_from_a_backup_ends_no_rank(etcd: Etcd, keys: ClusterKeys) -> None:
    """The publisher finds it before the lease is known to be lost."""
    old, new = (FakeRank(etcd, keys, registration(generation=number), TTL_S) for number in (1, 2))
    async with mirroring(etcd, keys) as mirror:
        async with running(old.run()):
            old.store(1)
            await until(lambda: old.is_mirrored_by(mirror))
            backup = [await etcd.get(key(old.id.key)) for key in (keys.registration, keys.head)]
        async with running(new.run()) as (task,):
            new.store(2)
            await until(lambda: new.is_mirrored_by(mirror))
            lease_id, _ = await etcd.grant_lease(TTL_S)  # that nobody keeps alive
            for restored in backup:
                assert restored is not None
                await etcd.put(restored.key, restored.value, lease_id)
            new.store(3)
            await until(lambda: new.membership.publisher.disputed.is_set())
            await until(lambda: new.is_mirrored_by(mirror))
            assert not task.done() and new.membership.lease_losses == 0


async def test_a_restored_etcd_that_has_overtaken_a_reader_is_listed_anew(tmp_path: Path) -> None:
    """What it was told after the backup is not so any more, whatever the revision says."""
    backup = tmp_path / "backup"
    server = EmbeddedEtcd(tmp_path / "etcd", extra_arguments=FAST)
    async with server, client(server.endpoint, timeout_s=1.0) as etcd:
        gone, stays = rank_of(etcd, "gone", 1), rank_of(etcd, "stays", 1)
        async with mirroring(etcd, KEYS) as mirror, running(stays.run()):
            stays.store(1)
            await until(lambda: stays.is_mirrored_by(mirror))
            await save(server, backup)
            async with killed_at_the_end(gone):
                gone.store(2)
                await until(lambda: gone.is_mirrored_by(mirror))
                await server.kill()  # with the lease that would have lapsed
            await restore(server, backup)
            elsewhere = EmbeddedEtcd(server.log_path.parent, extra_arguments=FAST)
            async with elsewhere, client(elsewhere.endpoint) as other:
                while await other.current_revision() < mirror.revision + 100:
                    await other.put(b"elsewhere", b"")
            await server.start()
            await until(lambda: mirror.listings == 2 and stays.is_mirrored_by(mirror))
            assert not mirror.ranks[gone.id.key].registered


async def test_while_leases_live_on_what_the_backup_lacks_is_told_again(tmp_path: Path) -> None:
    """Of the busy rank and of the idle one the head is as it was, and not all that came after it."""
    backup = tmp_path / "backup"
    async with (
        EmbeddedEtcd(tmp_path / "etcd", extra_arguments=FAST) as server,
        client(server.endpoint) as etcd,
        client(server.endpoint) as reader,
        mirroring(reader, KEYS) as mirror,
    ):
        busy, idle = (
            FakeRank(etcd, KEYS, registration(worker), ttl_s=120, settings=PublisherSettings(flush_s=0.001))
            for worker in ("busy", "idle")
        )
        async with running(busy.run(), idle.run()):
            for rank in (busy, idle):
                rank.store(1, 2)
                await until(lambda r=rank: r.is_mirrored_by(mirror))
                rank.store(3)  # a delta: the head stays
                await until(lambda r=rank: r.is_mirrored_by(mirror))
            await save(server, backup)
            for number in range(10, 14):
                busy.store(number)
                await until(lambda: busy.is_mirrored_by(mirror))
            idle.store(9)
            idle.evict(1)
            await until(lambda: idle.is_mirrored_by(mirror))
            await server.kill()
            await restore(server, backup)
            await server.start()
            busy.store(50)
            await until(
                lambda: mirror.listings == 2 and all(rank.is_mirrored_by(mirror) for rank in (busy, idle)),
                timeout_s=30.0,
            )
            assert not mirror.index.match(idle.id.key, [1])
            assert all(mirror.progress(rank.id.key).current for rank in (busy, idle))
            assert busy.membership.lease_losses == idle.membership.lease_losses == 0
