"""A router serves as soon as it knows the ranks, by load alone, and says so while the index is read."""

import asyncio

from cluster.harness import FakeCluster
from cluster.metrics_page import samples, value
from services.engine.fake import continuation
from services.index.read.mirror import Mirror
from services.router import app

PROMPT = [(13 * i) % 500 for i in range(40)]


async def loading(cluster):
    page = await samples(cluster.routers[0], cluster)
    return value(page, "isthmus_router_degraded", reason="index_loading")


async def test_a_router_serves_while_it_reads_the_index(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, caplog
):
    released, apply = asyncio.Event(), Mirror._apply

    async def held(mirror, batch):
        if mirror.ranks_known.is_set():
            await released.wait()
        await apply(mirror, batch)

    monkeypatch.setattr(Mirror, "_apply", held)
    monkeypatch.setattr(app, "_INDEX_TIMEOUT_S", 0.05)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        mirror = cluster.routers[0].mirror
        assert mirror.ranks_known.is_set() and not mirror.ready.is_set()
        assert "router_degraded reason=" in caplog.text and "index_loading" in caplog.text
        tokens, finish = await cluster.generate(PROMPT)
        assert tokens == continuation(PROMPT, 8)
        assert finish.usage.decode_prefix_len == 0
        assert not mirror.ready.is_set()
        assert await loading(cluster) == 1
        released.set()
        async with asyncio.timeout(20):
            while await loading(cluster):
                await asyncio.sleep(0.02)
        assert mirror.ready.is_set()
        await cluster.assert_nothing_held()
