"""What runs on a rank that drains, or is on its way there, ends there or goes elsewhere unharmed."""

import asyncio

import pytest

from cluster.harness import FakeCluster, ids_request, prompt_of
from cluster.metrics_page import moves
from etcd.real_etcd import client
from services.engine.fake import continuation
from services.index.keys import ClusterKeys
from services.wire.isthmus.v1 import generation_pb2


async def test_a_prefill_rank_that_drains_costs_nobody_a_retry(
    etcd_endpoint, model_dir, cluster_name, monkeypatch
):
    """It says so before it refuses; until the routers have heard, it takes what they send."""
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(1, 1)) as cluster:
        router, leaving = cluster.routers[0], cluster.ranks["prefill-0/0"]
        key = leaving.address.id.key

        stopping, answered = asyncio.Event(), [0, 0, 0]

        async def router_has_heard_and_what_it_sent_before_has_come():
            async with asyncio.timeout(20):
                while not router.mirror.ranks[key].draining:
                    await asyncio.sleep(0.005)
                before = list(answered)
                while any(now < then + 2 for now, then in zip(answered, before, strict=True)):
                    await asyncio.sleep(0.005)

        async def keep_asking(asker):
            while not stopping.is_set():
                prompt = prompt_of(100 * asker + answered[asker])
                tokens, _ = await cluster.generate(prompt)
                assert tokens == continuation(prompt, 8)
                answered[asker] += 1

        monkeypatch.setattr(
            "services.rank.intake._be_noticed", router_has_heard_and_what_it_sent_before_has_come
        )
        asking = [asyncio.create_task(keep_asking(asker)) for asker in range(3)]
        await leaving.drain()
        explained = await cluster.stubs[0].Explain(
            generation_pb2.ExplainRequest(request=ids_request([0] * 8))
        )
        excluded = {c.prefill.worker: c.excluded for c in explained.candidates}
        assert "draining" in excluded["prefill-0"] and not excluded["prefill-1"]
        await cluster.stop_rank("prefill-0/0")
        async with asyncio.timeout(10):
            while key in router.mirror.ranks:
                await asyncio.sleep(0.005)
        stopping.set()
        await asyncio.gather(*asking)
        assert await moves(cluster, "retry", "migration") == 0
        await cluster.assert_nothing_held()


@pytest.mark.long
async def test_what_runs_on_a_decode_rank_that_drains_ends_there_though_its_lease_is_lost(
    etcd_endpoint, model_dir, cluster_name
):
    """A key that goes while the rank drains looks as if the rank had left; but its stream speaks."""
    settings = dict(decode=(1,), fake_step_s=0.01)
    async with (
        FakeCluster(etcd_endpoint, model_dir, cluster_name, **settings) as cluster,
        client(etcd_endpoint) as etcd,
    ):
        router, leaving = cluster.routers[0], cluster.ranks["decode-0/0"]
        key, prompt = leaving.address.id.key, prompt_of(1)
        request = asyncio.create_task(cluster.generate(prompt, 200))
        forgotten = []
        async with asyncio.timeout(20):
            while not router.mirror.index.num_blocks(key):
                await asyncio.sleep(0.005)
            draining = asyncio.create_task(leaving.drain())
            while not router.mirror.ranks[key].draining:
                await asyncio.sleep(0.005)
            router.mirror.subscribe(lambda rank: forgotten.append(rank not in router.mirror.ranks))
            registered = await etcd.get(ClusterKeys(cluster_name).registration(key))
            await etcd.revoke_lease(registered.lease_id)
            while True not in forgotten:
                await asyncio.sleep(0.005)
        assert not request.done()
        tokens, _ = await request
        assert tokens == continuation(prompt, 200)
        assert await moves(cluster, "retry", "migration") == 0
        await draining
        await cluster.assert_nothing_held()
