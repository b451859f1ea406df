"""Ranks and routers against three real etcd members that are killed, stopped and compacted."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etcd.etcd_nodes import EtcdNodes
from etcd.real_etcd import client, running, until
from index.cluster import FakeRank, mirroring, registration
from services.etcd.etcd_client import Etcd
from services.index.degraded import Degraded
from services.index.keys import ClusterKeys
from services.index.pins import PinSettings, PinWriter
from services.index.read.mirror import Mirror, RankState
from services.values.rank import Generation, RankId

KEYS = ClusterKeys("c")


class Churn:
    """Two ranks that store and evict at random, until `rest`; of so many blocks some come again. At some of
    those that they hold they can go on."""

    def __init__(self, ranks: list[FakeRank], num_blocks: int) -> None:
        self.ranks = ranks
        self._blocks = range(num_blocks)
        self._rng = random.Random(5)
        self._resting = asyncio.Event()

    async def run(self) -> None:
        while not self._resting.is_set():
            for rank in self.ranks:
                rank.store(*self._rng.sample(self._blocks, 40))
                rank.evict(*self._rng.sample(sorted(rank.held), len(rank.held) // 3))
                rank.resume(*self._rng.sample(sorted(rank.held), len(rank.held) // 5))
            await asyncio.sleep(0.02)

    async def agree(self, *mirrors: Mirror) -> None:
        """Nothing changes any more, and every mirror holds just what the ranks hold."""
        self._resting.set()
        for mirror in mirrors:
            try:
                await until(
                    lambda m=mirror: (
                        m.degraded is None and all(rank.is_mirrored_by(m) for rank in self.ranks)
                    ),
                    timeout_s=30.0,
                )
            except AssertionError as error:
                raise AssertionError(f"{error}: {self._told(mirrors)}") from None

    def _told(self, mirrors: Sequence[Mirror]) -> str:
        """What each side says of itself."""
        ranks = [
            f"{rank.id}: holds {len(rank.held)}, goes on at {len(rank.resumable)}, "
            f"{rank.membership.publisher}, registered {rank.membership.registered.is_set()}, "
            f"lost leases {rank.membership.lease_losses}"
            for rank in self.ranks
        ]
        seen = [
            f"{mirror.index}, {len(mirror.index.checkpoints)} resumable, at {mirror.revision}, "
            f"degraded {mirror.degraded}, gaps {mirror.blocks.gaps}"
            for mirror in mirrors
        ]
        return "; ".join([*ranks, *seen])


@asynccontextmanager
async def churning(nodes: EtcdNodes, num_blocks: int = 2000) -> AsyncIterator[tuple[Churn, Mirror, Mirror]]:
    """Two ranks and two routers, each with a client of its own."""
    clients = [client(*nodes.endpoints, seed=seed, timeout_s=2.0) for seed in range(4)]
    ranks = [FakeRank(clients[i], KEYS, registration(f"d{i}"), ttl_s=1) for i in range(2)]
    churn = Churn(ranks, num_blocks)
    try:
        async with (
            running(*(rank.run() for rank in ranks), churn.run()),
            mirroring(clients[2], KEYS, "r0") as first,
            mirroring(clients[3], KEYS, "r1") as second,
        ):
            await until(lambda: all(len(m.ranks) == 2 and m.index.total_blocks for m in (first, second)))
            yield churn, first, second
    finally:
        for opened in clients:
            await opened.close()


@pytest.mark.long
async def test_members_die_one_after_the_other_and_nobody_loses_anything(tmp_path: Path) -> None:
    async with EtcdNodes(tmp_path) as nodes, churning(nodes) as (churn, *mirrors):
        for node in nodes.nodes:
            before = min(mirror.revision for mirror in mirrors)
            await node.stop()
            await until(lambda b=before: all(m.revision > b + 5 for m in mirrors), timeout_s=30.0)
            await node.start()
        await churn.agree(*mirrors)
        assert all(mirror.blocks.gaps == mirror.torn_values == 0 for mirror in mirrors)


@pytest.mark.long
async def test_all_members_are_away_until_every_lease_is_lost_and_routing_goes_on(tmp_path: Path) -> None:
    async with EtcdNodes(tmp_path) as nodes, churning(nodes) as (churn, first, second):
        await nodes.kill_all()
        for rank in churn.ranks:
            await until(lambda r=rank: r.membership.lease_losses > 0 and not r.membership.registered.is_set())
        await until(lambda: first.degraded_reason is second.degraded_reason is Degraded.AWAY)
        assert len(first.ranks) == 2 and first.index.total_blocks > 0  # from memory
        await nodes.start_all()
        await until(lambda: all(rank.membership.registered.is_set() for rank in churn.ranks), timeout_s=30.0)
        await churn.agree(first, second)
        assert all(view.state is RankState.LIVE for view in (*first.ranks.values(), *second.ranks.values()))


@pytest.mark.long
async def test_all_members_lose_their_data_and_nobody_is_restarted(tmp_path: Path) -> None:
    """Twice: revisions begin anew, and soon pass what the routers had read of the etcd before."""
    async with EtcdNodes(tmp_path) as nodes, churning(nodes) as (churn, first, second):
        for wipes in (1, 2):
            await nodes.wipe()
            await until(lambda w=wipes: first.listings > w and second.listings > w, timeout_s=30.0)
            await until(
                lambda: all(rank.membership.registered.is_set() for rank in churn.ranks), timeout_s=30.0
            )
            # Who has seen nothing written since it listed cannot know the next etcd for another one.
            listed = max(first.revision, second.revision)
            await until(lambda r=listed: min(first.revision, second.revision) > r, timeout_s=30.0)
        await churn.agree(first, second)
        assert all(view.state is RankState.LIVE for view in (*first.ranks.values(), *second.ranks.values()))
        async with client(*nodes.endpoints) as admin:
            for rank in churn.ranks:
                assert await admin.get(KEYS.registration(rank.id.key)) is not None


@pytest.mark.slow
async def test_a_minute_away(tmp_path: Path) -> None:
    async with EtcdNodes(tmp_path) as nodes, churning(nodes, num_blocks=1 << 60) as (churn, first, second):
        await nodes.kill_all()
        await asyncio.sleep(60.0)
        assert first.index.total_blocks > 0 and first.degraded_reason is Degraded.AWAY
        for rank in churn.ranks:
            # A hundred thousand blocks have come and gone; of a pool, no more waits than it holds.
            ledger = rank.membership.publisher._ledger
            waiting = [len(each._added) + len(each._removed) for each in (ledger._held, ledger._resumable)]
            assert len(rank.held) < 500 and sum(waiting) < 1000
        await nodes.start_all()
        await churn.agree(first, second)


@pytest.mark.long
async def test_compacted_under_a_watcher_that_stands_still(tmp_path: Path) -> None:
    async with EtcdNodes(tmp_path) as nodes, churning(nodes) as (churn, first, second):
        async with client(*nodes.endpoints) as admin:
            async with first.blocks.lock:  # it takes nothing in
                start = await admin.current_revision()
                await until(lambda: second.revision > start + 20, timeout_s=30.0)
                # Its stream ends, too: it must ask for revisions that are gone.
                for node in nodes.nodes:
                    await node.stop()
                    await node.start()
                await admin.compact(await admin.current_revision())
            await churn.agree(first, second)
        assert first.listings >= 2


@pytest.mark.long
async def test_ten_thousand_pins_of_two_routers(tmp_path: Path) -> None:
    """Each conversation is pinned by both; whoever was last stands, and both see the same pins."""
    names = [f"conversation {number}" for number in range(10_000)]
    async with (
        EtcdNodes(tmp_path) as nodes,
        client(*nodes.endpoints) as one,
        client(*nodes.endpoints) as two,
        mirroring(one, KEYS, "r0") as first,
        mirroring(two, KEYS, "r1") as second,
    ):
        writers = [_writer(one, first), _writer(two, second)]
        for number, writer in enumerate(writers):
            for name in names:
                writer.pin(name, RankId(f"d{number}", 0, Generation(1)))
        async with running(*(writer.run() for writer in writers)):
            await until(lambda: sum(writer.written for writer in writers) >= 20_000, timeout_s=60.0)
            await until(lambda: len(first.pins) == len(second.pins) == 10_000, timeout_s=60.0)
            await until(lambda: all(first.pin(name) == second.pin(name) for name in names))
        assert [writer.written for writer in writers] == [10_000, 10_000]


def _writer(etcd: Etcd, mirror: Mirror) -> PinWriter:
    return PinWriter(etcd, KEYS, mirror.known_pin, PinSettings(gather_s=0.001))
