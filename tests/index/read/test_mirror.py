"""Publishers, a real etcd and mirrors, end to end."""

import asyncio
import gc
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from etcd.deletions import delete, delete_prefix
from etcd.real_etcd import FAST, client, running, until
from index.cluster import EAGER, SCHEMA, FakeRank, mirroring, registration
from services.etcd.embedded import EmbeddedEtcd, etcd_binary
from services.etcd.etcd_client import Etcd
from services.etcd.etcd_errors import EtcdNoSpace
from services.etcd.watch import KeyChange, WatchBatch
from services.index.codec import decode_record
from services.index.degraded import Degraded
from services.index.joining import Schema, check_schema, keep_schema, register
from services.index.keys import ClusterKeys, HeadKey, LogKey, pin_name
from services.index.pins import KnownPin, Pin, encode_pin
from services.index.read import block_mirror
from services.index.read.mirror import Mirror, RankState, keep_from_garbage_collector
from services.index.write import membership
from services.values.errors import ConfigError
from services.values.rank import Generation, RankId, RankKey


def wrote_all_kinds(rank: FakeRank) -> bool:
    """Return how often it writes is up to the machine."""
    publisher = rank.membership.publisher
    return publisher.snapshots_written > 2 and publisher.deltas_written > 4


async def test_mirrors_hold_what_ranks_hold(etcd: Etcd, keys: ClusterKeys) -> None:
    """Two ranks change at random; a mirror from the start and one that comes late agree with them."""
    rng = random.Random(7)
    ranks = [FakeRank(etcd, keys, registration(worker)) for worker in ("d0", "d1")]
    async with running(*(rank.run() for rank in ranks)), mirroring(etcd, keys) as early:
        changes = 0
        while changes < 60 or not all(wrote_all_kinds(rank) for rank in ranks):
            changes += 1
            for rank in ranks:
                rank.store(*rng.sample(range(1000), rng.randrange(1, 60)))
                rank.evict(*rng.sample(sorted(rank.held), len(rank.held) // 3))
                if rng.random() < 0.05:
                    rank.clear()
            await asyncio.sleep(0.002)  # so that there are many deltas and not one
        async with mirroring(etcd, keys, "late") as late:
            for mirror in (early, late):
                await until(lambda m=mirror: all(rank.is_mirrored_by(m) for rank in ranks))
                assert set(mirror.ranks) == {rank.id.key for rank in ranks}
                assert mirror.torn_values == mirror.blocks.resyncs == 0
                await until(lambda m=mirror: m.degraded is None)
        _, kvs = await etcd.snapshot(keys.prefix + b"prefix/")
        assert len(kvs) < 2 * (1 + 4 + 1000 // 40 + 1)  # old epochs and logs are gone


async def test_what_lies_below_has_a_log_of_its_own(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "BELOW", EAGER)
    rng = random.Random(7)
    tiered = FakeRank(etcd, keys, registration("d0"), with_tiers=True)
    plain = FakeRank(etcd, keys, registration("d1"))
    async with mirroring(etcd, keys) as early:
        async with running(tiered.run(), plain.run()):
            for _ in range(30):
                below = set(rng.sample(range(500), 200))
                tiered.demote(below, {block for block in below if block % 3 == 0})
                plain.store(*rng.sample(range(500), 10))
                await asyncio.sleep(0.005)
            async with mirroring(etcd, keys, "late") as late:
                for mirror in (early, late):
                    await until(lambda m=mirror: tiered.is_mirrored_below(m) and plain.is_mirrored_by(m))
                    assert mirror.index.num_blocks(tiered.id.key) == mirror.torn_values == 0
            assert tiered.membership.below is not None and tiered.membership.below.deltas_written > 3
            _, kvs = await etcd.snapshot(keys.prefix + b"below/")
            parsed = [keys.parse(kv.key) for kv in kvs]
            assert {key.rank for key in parsed if isinstance(key, HeadKey)} == {tiered.id.key}
        await until(lambda: not early.ranks[tiered.id.key].registered)
        early.mark_dead(tiered.id.key)
        assert early.below.index.is_empty, "it is gone, and what lay below it"


async def test_routers_know_of_each_other(etcd: Etcd, keys: ClusterKeys) -> None:
    async with mirroring(etcd, keys, "a") as first, mirroring(etcd, keys, "b") as second:
        await until(lambda: first.place_among_routers() == (0, 2))
        await until(lambda: second.place_among_routers() == (1, 2))


async def test_no_rank_is_forgotten_while_etcd_is_away(own_server: EmbeddedEtcd) -> None:
    keys = ClusterKeys("c")
    async with client(own_server.endpoint, timeout_s=1.0) as etcd:
        rank = FakeRank(etcd, keys, registration())
        key = rank.id.key
        async with mirroring(etcd, keys) as mirror:
            async with running(rank.run()):
                rank.store(1, 2)
                await until(lambda: rank.is_mirrored_by(mirror))
            await until(lambda: not mirror.ranks[key].registered)
            await own_server.kill()
            await until(lambda: mirror.degraded is not None)
            mirror.mark_dead(key)
            assert mirror.ranks[key].state is RankState.SUSPECT and mirror.index.match_all([1, 2]) == {key: 2}


@pytest.mark.long
async def test_a_full_etcd_is_said_and_registrations_come_back_first(tmp_path: Path) -> None:
    """The quota is reached by others; an operator makes room."""
    keys = ClusterKeys("c")
    quota = ("--quota-backend-bytes=2097152", *FAST)
    async with (
        EmbeddedEtcd(tmp_path / "etcd", extra_arguments=quota) as server,
        client(server.endpoint) as etcd,
    ):
        rank = FakeRank(etcd, keys, registration())
        async with running(rank.run()), mirroring(etcd, keys) as mirror:
            rank.store(1)
            await until(lambda: rank.is_mirrored_by(mirror))
            with pytest.raises(EtcdNoSpace):
                for number in range(100):
                    await etcd.put(b"others/%d" % number, bytes(200_000))
            rank.store(2)
            await until(lambda: rank.membership.publisher.degraded is Degraded.FULL)
            await until(lambda: mirror.degraded_reason is Degraded.FULL)
            assert "etcd is full" in (mirror.degraded or "")
            assert mirror.index.match_all([1]) == {rank.id.key: 1}
            await etcd.revoke_lease(await rank.lease_id())  # registering again needs room, too
            await until(lambda: not rank.membership.registered.is_set())
            await delete_prefix(etcd, b"others/")
            await etcd.compact(await etcd.current_revision())
            for arguments in (("defrag",), ("alarm", "disarm")):
                etcdctl = etcd_binary().with_name("etcdctl")
                process = await asyncio.create_subprocess_exec(
                    etcdctl, "--endpoints", server.endpoint, *arguments, stdout=asyncio.subprocess.DEVNULL
                )
                assert await process.wait() == 0
            await until(rank.membership.registered.is_set)
            await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)


async def test_what_etcd_refuses_later_ends_neither_rank_nor_router(
    etcd: Etcd, etcd_endpoint: str, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role taken away, a password changed: an operator's mistake that an operator mends."""
    rank = FakeRank(etcd, keys, registration(), ttl_s=1)
    refused = ConfigError("etcd refuses this user")
    async with running(rank.run()) as (rank_task,):
        mirror = Mirror(etcd, keys, "r0", probe_interval_s=0.05)
        async with running(mirror.run()) as (mirror_task,):
            await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)
            lease_id = await rank.lease_id()
            with monkeypatch.context() as patched:

                async def refuse(*arguments: object, **options: object) -> None:
                    raise refused

                for name in ("unary", "open_stream"):
                    patched.setattr(etcd.connection, name, refuse)
                rank.store(1)
                await until(lambda: rank.membership.publisher.degraded is Degraded.REFUSED)
                await until(lambda: mirror.degraded_reason is Degraded.REFUSED)
                async with client(etcd_endpoint) as admin:
                    await admin.revoke_lease(lease_id)
                await until(lambda: not rank.membership.registered.is_set())
            await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)
            assert not rank_task.done() and not mirror_task.done()


async def test_etcd_away_is_degraded_and_everything_goes_on_from_memory(own_server: EmbeddedEtcd) -> None:
    keys = ClusterKeys("c")
    async with client(own_server.endpoint, timeout_s=1.0) as etcd, client(own_server.endpoint) as reader:
        rank = FakeRank(etcd, keys, registration())
        async with running(rank.run()), mirroring(reader, keys) as mirror:
            rank.store(1, 2, 3)
            await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)
            await own_server.kill()
            await until(lambda: mirror.degraded is not None)
            assert mirror.index.match_all([1, 2, 3]) == {rank.id.key: 3} and mirror.ready.is_set()
            rank.evict(3)
            rank.store(4)
            assert mirror.index.correct(rank.id.key, [1, 2, 3], 2) == 1
            await until(lambda: rank.membership.publisher.trouble is not None)
            await own_server.start()
            await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)
            assert mirror.ranks[rank.id.key].state is RankState.LIVE


@pytest.mark.long
async def test_an_etcd_that_lost_everything_is_filled_again(tmp_path: Path) -> None:
    keys = ClusterKeys("c")
    async with EmbeddedEtcd(tmp_path / "first", extra_arguments=FAST) as first:
        port = int(first.endpoint.rpartition(":")[2])
        async with client(first.endpoint, timeout_s=1.0) as etcd, client(first.endpoint) as reader:
            rank = FakeRank(etcd, keys, registration(), ttl_s=1)
            async with running(rank.run()), mirroring(reader, keys) as mirror:
                for block in range(30):
                    rank.store(block)
                    await asyncio.sleep(0.001)
                await until(lambda: rank.is_mirrored_by(mirror))
                await first.kill()
                second = EmbeddedEtcd(tmp_path / "second", client_port=port, extra_arguments=FAST)
                async with second:
                    rank.store(99)
                    await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)
                    assert mirror.ranks[rank.id.key].state is RankState.LIVE
                    with pytest.raises(ConfigError):  # the cluster's schema was written again
                        await check_schema(etcd, keys, Schema(128, SCHEMA.hash_scheme))


async def test_before_the_first_listing_it_says_so() -> None:
    async with client("127.0.0.1:1", timeout_s=0.1) as nowhere:
        mirror = Mirror(nowhere, ClusterKeys("c"), "r0")
        assert mirror.degraded is not None and "not been read yet" in mirror.degraded
        async with running(mirror.run()):
            await until(lambda: "no etcd endpoint answers" in (mirror.degraded or ""))
        assert not mirror.ready.is_set()


async def test_torn_and_foreign_values_are_counted_and_skipped(etcd: Etcd, keys: ClusterKeys) -> None:
    key = RankKey("d0", 0)
    rank = FakeRank(etcd, keys, registration())
    async with mirroring(etcd, keys) as mirror, running(rank.run()):
        rank.store(1)
        await until(lambda: rank.is_mirrored_by(mirror))
        torn = (
            keys.log(key, 10**6),
            keys.registration(RankKey("x", 0)),
            keys.pin("p"),
            keys.prefix + b"what",
        )
        for torn_key in torn:
            await etcd.put(torn_key, b"\xff\xff")
        stolen = await etcd.get(keys.registration(key))
        assert stolen is not None
        await etcd.put(keys.registration(RankKey("thief", 0)), stolen.value)
        await until(lambda: mirror.torn_values == len(torn) + 1)
        rank.store(2)
        await until(lambda: rank.is_mirrored_by(mirror))
        assert set(mirror.ranks) == {key}


async def test_a_lost_delta_is_made_up_for(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One delta reaches the mirror torn; reading it again gives it whole."""
    torn: list[int] = []

    def tear_once(key, value: bytes):
        if isinstance(key, LogKey) and not torn:
            torn.append(key.seq)
            return decode_record(key, b"\xff")
        return decode_record(key, value)

    rank = FakeRank(etcd, keys, registration())
    async with mirroring(etcd, keys) as mirror, running(rank.run()):
        await until(lambda: rank.is_mirrored_by(mirror))
        monkeypatch.setattr(block_mirror, "decode_record", tear_once)
        for block in range(2):
            rank.store(block)
            await until(lambda n=block: rank.membership.publisher.deltas_written > n)
        await until(lambda: rank.is_mirrored_by(mirror) and mirror.progress(rank.id.key).current)
        assert (mirror.torn_values, mirror.blocks.gaps, mirror.blocks.resyncs) == (1, 1, 1)


async def test_staleness_counts_the_way_through_etcd(own_server: EmbeddedEtcd) -> None:
    async with (
        client(own_server.endpoint, timeout_s=0.3) as etcd,
        mirroring(etcd, ClusterKeys("c")) as mirror,
    ):
        await until(lambda: 0 < mirror.staleness_s < 1)
        await own_server.kill()
        before = mirror.staleness_s
        await until(lambda: mirror.staleness_s > before + 0.2)


async def test_each_rank_has_a_staleness_of_its_own(
    etcd: Etcd, keys: ClusterKeys, etcd_endpoint: str
) -> None:
    """The age of what was told of late; else for how long nothing can be told."""
    later_s = 0.0
    lost, quiet, silent = (registration(worker) for worker in ("d0", "d1", "d2"))
    async with client(etcd_endpoint) as reader, mirroring(reader, keys) as mirror:
        reader.clock = lambda: etcd.clock() + later_s
        assert mirror.rank_staleness_s(lost.id.key) == 0.0
        ranks = [FakeRank(etcd, keys, its) for its in (lost, quiet)]
        lease_id, _ = await etcd.grant_lease(60)
        async with running(*(rank.run() for rank in ranks)):
            for rank in ranks:
                rank.store(1)
            await register(etcd, keys, silent, lease_id)
            await until(lambda: all(rank.is_mirrored_by(mirror) for rank in ranks))
            await until(lambda: silent.id.key in mirror.ranks)
            assert all(mirror.rank_staleness_s(its.id.key) < 60 for its in (lost, quiet, silent))
            await delete(etcd, keys.registration(lost.id.key))
            await until(lambda: not mirror.ranks[lost.id.key].registered)
            later_s = 3600.0
            await until(lambda: mirror.rank_staleness_s(quiet.id.key) < 60)  # once the probe is through
            assert mirror.rank_staleness_s(lost.id.key) >= 3600
            assert mirror.rank_staleness_s(silent.id.key) >= 3600
            mirror.mark_dead(lost.id.key)
            assert mirror.rank_staleness_s(lost.id.key) == 0.0


async def test_pins_are_mirrored_and_bounded(etcd: Etcd, keys: ClusterKeys) -> None:
    pin = Pin(RankId("d0", 0, Generation(1)), RankId("p0", 0, Generation(2)))
    mirror = Mirror(etcd, keys, "r0", max_pins=3)
    async with running(mirror.run()):
        for number in range(4):
            await etcd.put(keys.pin(pin_name(f"talk {number}")), encode_pin(pin))
        await until(lambda: mirror.pin("talk 3") == pin)
        assert mirror.pin("talk 0") is None and len(mirror.pins) == 3
        await delete(etcd, keys.pin(pin_name("talk 3")))
        await until(lambda: mirror.pin("talk 3") is None)


async def test_pins_are_known_while_they_are_listed_again(etcd: Etcd, keys: ClusterKeys) -> None:
    here, there = (Pin(RankId("d0", rank, Generation(1))) for rank in (0, 1))
    mirror, name = Mirror(etcd, keys, "r0"), pin_name("talk")

    def put(pin: Pin, revision: int) -> tuple[KeyChange]:
        return (KeyChange(keys.pin(name), encode_pin(pin), revision),)

    await mirror._apply(WatchBatch(1, put(here, 1), listed=True, first=True))
    await mirror._apply(WatchBatch(3, (), listed=True, complete=False, first=True))
    assert mirror.known_pin(name) == KnownPin(here, 1)
    await mirror._apply(WatchBatch(3, put(there, 2), listed=True, complete=False))
    assert mirror.known_pin(name) == KnownPin(there, 2)
    await mirror._apply(WatchBatch(3, (), listed=True))
    assert mirror.known_pin(name) == KnownPin(there, 2)
    with_torn_value = (KeyChange(keys.pin(name), b"\xff", 4),)
    await mirror._apply(WatchBatch(4, with_torn_value))
    assert mirror.known_pin(name) is None and mirror.torn_values == 1


async def test_pins_that_went_while_nobody_watched_are_gone(own_server: EmbeddedEtcd) -> None:
    keys, pin = ClusterKeys("c"), Pin(RankId("d0", 0, Generation(1)))
    async with (
        client(own_server.endpoint) as etcd,
        client(own_server.endpoint) as writer,
        mirroring(etcd, keys) as mirror,
    ):
        for name in ("stays", "goes"):
            await writer.put(keys.pin(pin_name(name)), encode_pin(pin))
        await until(lambda: len(mirror.pins) == 2)
        async with mirror.blocks.lock:  # it takes nothing in
            start = mirror.revision
            await until(lambda: mirror.revision > start)  # its own probe's: now it stands still
            await own_server.kill()
            await own_server.start()
            await delete(writer, keys.pin(pin_name("goes")))
            await writer.compact(await writer.current_revision())
        await until(lambda: mirror.listings == 2 and mirror.degraded is None)
        assert mirror.pin("stays") == pin and mirror.pin("goes") is None and len(mirror.pins) == 1
        assert not any(key.startswith(keys.pins) for key in mirror._watch._delivered)


async def test_the_schema_is_created_once_and_then_compared(etcd: Etcd, keys: ClusterKeys) -> None:
    await asyncio.gather(*(check_schema(etcd, keys, Schema(64, "xxh3-64/1")) for _ in range(5)))
    with pytest.raises(ConfigError, match=r"64 tokens per index block.*this process has.* 32 tokens"):
        await check_schema(etcd, keys, Schema(32, "xxh3-64/1"))
    other = FakeRank(etcd, keys, registration())
    other.membership._schema = Schema(64, "sha256/1")
    with pytest.raises(ExceptionGroup) as raised:
        await other.run()
    assert raised.group_contains(ConfigError, match="sha256")


async def test_an_etcd_whose_members_may_diverge_is_warned_of(
    etcd_endpoint: str, keys: ClusterKeys, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        client(etcd_endpoint, etcd_endpoint) as several,
        running(keep_schema(several, keys, SCHEMA, lambda: 0)),
    ):
        await until(lambda: "etcd_version_faulty version=3.5.1" in caplog.text)


async def test_a_router_writes_the_schema_again_when_etcd_is_listed_anew(
    etcd: Etcd, keys: ClusterKeys, caplog: pytest.LogCaptureFixture
) -> None:
    listings = 0
    async with running(keep_schema(etcd, keys, SCHEMA, lambda: listings, 0.001)) as (task,):

        async def until_compared_with(schema: Schema) -> None:
            async with asyncio.timeout(10.0):
                while await etcd.get(keys.schema) is None:
                    await asyncio.sleep(0.005)
            await check_schema(etcd, keys, schema)

        await until_compared_with(SCHEMA)
        await delete(etcd, keys.schema)
        listings = 1
        await until_compared_with(SCHEMA)
        await delete(etcd, keys.schema)
        await check_schema(etcd, keys, Schema(128, SCHEMA.hash_scheme))  # another was first
        listings = 2
        await until(lambda: "schema_refused" in caplog.text)
        assert not task.done()
    await delete(etcd, keys.schema)
    await check_schema(etcd, keys, Schema(128, SCHEMA.hash_scheme))
    with pytest.raises(ConfigError):
        await keep_schema(etcd, keys, SCHEMA, lambda: 0)


async def test_what_is_read_is_frozen_once_all_of_it_is() -> None:
    """Frozen objects are counted; those made here are found among them, while a few of others' may end."""
    mirror = SimpleNamespace(ready=asyncio.Event())
    try:
        async with running(keep_from_garbage_collector(mirror)) as (task,):  # type: ignore[arg-type]
            read = [[number] for number in range(100_000)]
            await asyncio.sleep(0)
            before = gc.get_freeze_count()
            assert not task.done()
            mirror.ready.set()
            await until(task.done)
            assert gc.get_freeze_count() >= before + len(read) // 2
    finally:
        gc.unfreeze()
