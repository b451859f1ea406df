"""Two whole routers, and requests all the time, on three etcd members that die, are away and compact.

What the mirrors alone go through in each of these is in tests/index/test_outages.py.
"""

import asyncio
import random
from contextlib import asynccontextmanager
from functools import partial

import pytest

from cluster.harness import FakeCluster
from cluster.metrics_page import samples, value
from etcd.etcd_nodes import EtcdNodes
from etcd.real_etcd import client
from index.contents import contents_of
from services.engine.fake import continuation
from services.index.degraded import Degraded
from services.index.keys import ClusterKeys

_MAX_TURNS = 6


class Askers:
    """Conversations that go on, each turn to either router; whatever fails is raised by `rest`."""

    def __init__(self, cluster, count=4):
        self.answered = [0, 0]  # by each router
        self._cluster = cluster
        self._rng = random.Random(3)
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._converse(number)) for number in range(count)]

    async def _converse(self, asker):
        ids, turn, number = [], 0, 0
        while not self._stopping.is_set():
            if turn % _MAX_TURNS == 0:
                number += 1
                ids = [(asker * 97 + number * 31 + i * 5) % 500 for i in range(21)]
            router, name = self._rng.randrange(2), f"{asker}-{number % 10}"
            tokens, _ = await self._cluster.generate(ids, router=router, conversation_id=name)
            assert tokens == continuation(ids, 8)
            self.answered[router] += 1
            ids, turn = [*ids, *tokens, turn % 500], turn + 1

    async def until_answered(self, more=10):
        """Both routers have served so many more requests."""
        wanted = [count + more for count in self.answered]
        await until(lambda: self._done() or all(a >= w for a, w in zip(self.answered, wanted, strict=True)))
        self._raise()

    async def rest(self):
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def cancel(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self):
        return any(task.done() for task in self._tasks)

    def _raise(self):
        for task in self._tasks:
            if task.done():
                task.result()


async def until(condition, timeout_s=60.0):
    """`condition` may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while not (await found if asyncio.iscoroutine(found := condition()) else found):
            await asyncio.sleep(0.02)


@asynccontextmanager
async def asked(folder, model_dir, name):
    """(etcd's nodes, the cluster, who asks it)."""
    async with EtcdNodes(folder) as nodes:
        cluster = FakeCluster(
            nodes.endpoints, model_dir, name, routers=2, prefill=(2,), lease_ttl_s=1, fake_step_s=0.005
        )
        async with cluster:
            askers = Askers(cluster)
            try:
                yield nodes, cluster, askers
            finally:
                await askers.cancel()


async def degraded(cluster, reason):
    """Per router, whether its gauge gives this reason."""
    pages = await asyncio.gather(*(samples(router, cluster) for router in cluster.routers))
    return [value(page, "isthmus_router_degraded", reason=reason) == 1 for page in pages]


async def follows(cluster):
    """Tell whether no router's gauge gives any reason."""
    return not any([any(await degraded(cluster, reason.value)) for reason in Degraded])


async def agree(cluster):
    """Both routers hold what each rank publishes, and the same pins; nobody has begun a new life."""
    one, other = (router.mirror for router in cluster.routers)

    async def same():
        blocks = {}
        for rank in cluster.ranks.values():
            page = await samples(rank, cluster)
            blocks[rank.address.id.key] = value(page, "isthmus_publisher_blocks")
        return (
            await follows(cluster)
            and all(
                {key: mirror.index.num_blocks(key) for key in blocks} == blocks for mirror in (one, other)
            )
            and contents_of(one.index) == contents_of(other.index)
            and dict(one.pins) == dict(other.pins)
        )

    await until(same)
    assert one.pins and one.index.total_blocks > 0
    lives = {rank.address.id for rank in cluster.ranks.values()}
    for mirror in (one, other):
        assert {view.registration.id for view in mirror.ranks.values()} == lives
        assert mirror.torn_values == 0
    assert not any(part.failed.is_set() for part in (*cluster.routers, *cluster.ranks.values()))
    await cluster.assert_nothing_held()


@pytest.mark.slow
async def test_members_die_one_after_the_other(tmp_path, model_dir, cluster_name):
    async with asked(tmp_path, model_dir, cluster_name) as (nodes, cluster, askers):
        for node in nodes.nodes:
            revisions = [router.mirror.revision for router in cluster.routers]
            await node.stop()
            await askers.until_answered()

            def all_go_on(before=revisions):
                after = [router.mirror.revision for router in cluster.routers]
                return all(now > then for now, then in zip(after, before, strict=True))

            await until(all_go_on)
            await node.start()
        await askers.rest()
        await agree(cluster)


async def away(tmp_path, model_dir, cluster_name, for_s):
    async with asked(tmp_path, model_dir, cluster_name) as (nodes, cluster, askers):
        await askers.until_answered()
        assert await follows(cluster)
        pinned = {name: known.pin for name, known in cluster.routers[0].mirror.pins.items()}
        await nodes.kill_all()

        async def everyone_knows():
            pages = await asyncio.gather(*(samples(rank, cluster) for rank in cluster.ranks.values()))
            lost = all(value(page, "isthmus_lease_losses_total") > 0 for page in pages)
            return lost and all(await degraded(cluster, "etcd_away"))

        await until(everyone_knows)
        await asyncio.sleep(for_s)
        await askers.until_answered()
        assert pinned.keys() <= cluster.routers[0].mirror.pins.keys()  # from memory
        await nodes.start_all()
        await askers.until_answered()
        await askers.rest()
        await agree(cluster)


@pytest.mark.long
async def test_all_members_are_away_until_every_lease_has_lapsed(tmp_path, model_dir, cluster_name):
    """What more a minute would bring is only time: see the slow one."""
    await away(tmp_path, model_dir, cluster_name, 0.0)


@pytest.mark.slow
async def test_all_members_are_away_for_a_minute(tmp_path, model_dir, cluster_name):
    await away(tmp_path, model_dir, cluster_name, 60.0)


@pytest.mark.long
async def test_all_members_lose_their_data(tmp_path, model_dir, cluster_name):
    """Ranks register again and tell what they hold, routers see it, and nobody is restarted."""
    async with asked(tmp_path, model_dir, cluster_name) as (nodes, cluster, askers):
        await askers.until_answered()
        await nodes.wipe()
        await askers.until_answered()
        await askers.rest()
        await agree(cluster)
        async with client(*nodes.endpoints) as admin:
            keys = ClusterKeys(cluster_name)
            await until(lambda: exists(admin, keys.schema))
            for rank in cluster.ranks.values():
                await until(partial(exists, admin, keys.registration(rank.address.id.key)))
        # A rank that comes now joins those who were there.
        await cluster.stop_rank("decode-0/1")
        await cluster.start_rank("decode", "decode-0", 1)
        await cluster.until_placeable()
        assert (await cluster.generate([5, 6, 7]))[0] == continuation([5, 6, 7], 8)


async def exists(etcd, key):
    return await etcd.get(key) is not None


@pytest.mark.slow
async def test_compacted_while_one_router_takes_nothing_in(tmp_path, model_dir, cluster_name):
    async with (
        asked(tmp_path, model_dir, cluster_name) as (nodes, cluster, askers),
        client(*nodes.endpoints) as admin,
    ):
        standing, going = (router.mirror for router in cluster.routers)
        listings = standing.listings
        async with standing.blocks.lock:
            start = await admin.current_revision()
            await until(lambda: going.revision > start + 20)
            for node in nodes.nodes:  # its stream ends, too: it must ask for revisions that are gone
                await node.stop()
                await node.start()
            await admin.compact(await admin.current_revision())
            await askers.until_answered()  # the one that stands still serves as well
        await until(lambda: standing.listings > listings)
        await askers.rest()
        await agree(cluster)
