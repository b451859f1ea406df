"""A cluster above its capacity says no at the door, and says when to come again; what it let in it serves."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request
from services.engine.fake import continuation
from services.wire.isthmus.v1 import generation_pb2

NUM_REQUESTS = 24


async def until_it_is_known_how_long_they_wait(cluster) -> float:
    """Seconds, as the router knows them."""
    async with asyncio.timeout(60):
        while True:
            answer = await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())
            (load,) = (status.load for status in answer.ranks if status.rank.worker == "decode-0")
            if load.waiting >= NUM_REQUESTS // 3 and load.admitted_per_s:
                return load.waiting / load.admitted_per_s
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("plan", ["local", pytest.param("remote", marks=pytest.mark.long)])
async def test_who_would_wait_longer_than_half_of_his_time_is_refused(
    etcd_endpoint, model_dir, cluster_name, plan
):
    slow = {"decode": (1,), "max_running_requests": 2, "fake_step_s": 0.02}
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, plans=(plan,), **slow)
    cluster.router_config = replace(cluster.router_config, max_priority=1)
    async with cluster:
        prompts = [[i, i + 1, 5, 7, 9] for i in range(NUM_REQUESTS)]
        let_in = [asyncio.create_task(cluster.generate(ids, timeout=120)) for ids in prompts]
        wait_s = await until_it_is_known_how_long_they_wait(cluster)
        request = ids_request([1, 2, 3])
        call = cluster.stubs[0].Generate(request, timeout=wait_s)  # of which half may be waited
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the cluster is full" in await call.details()
        assert int(dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1_000
        request.priority = 1  # comes before those that wait
        urgent = asyncio.create_task(anext(aiter(cluster.stubs[0].Generate(request, timeout=60))))
        for ids, (tokens, _) in zip(prompts, await asyncio.gather(*let_in), strict=True):
            assert tokens == continuation(ids, 8)
        assert (await urgent).token_ids
        tokens, _ = await cluster.generate([1, 2, 3], timeout=10)
        assert tokens == continuation([1, 2, 3], 8)
        await cluster.assert_nothing_held()


async def test_a_deadline_that_a_client_sets_is_known_where_its_request_waits(
    etcd_endpoint, model_dir, cluster_name
):
    slow = {"decode": (1,), "fake_prompt_token_s": 0.002, "kv_pages": 2000}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **slow) as cluster:
        left = {}

        def noting(name, of_rank):
            def call(request, *args):
                left[name] = request.left_s
                return of_rank(request, *args)

            return call

        decode, prefill = (cluster.ranks[f"{role}-0/0"].engine for role in ("decode", "prefill"))
        decode.generate = noting("decode", decode.generate)
        prefill.prefill = noting("prefill", prefill.prefill)
        await cluster.generate([1, 2, 3], timeout=20)
        assert 15 < left["prefill"] <= left["decode"] < 21
        await cluster.generate([4, 5, 6], timeout=None)
        assert left == {"decode": None, "prefill": None}
        await cluster.generate(range(100, 164))  # Now prefill knows its rate, some 500 a second.
        computed = prefill.load().computed_tokens
        call = cluster.stubs[0].Generate(ids_request([n % 400 for n in range(6000)]), timeout=5)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "6000 tokens of the prompt are still to be computed" in await call.details()
        assert prefill.load().computed_tokens == computed
        await cluster.assert_nothing_held()
        cluster.routers[0].generator._heeds_deadlines = False
        await cluster.generate([7, 8, 9], timeout=20)
        assert left == {"decode": None, "prefill": None}
