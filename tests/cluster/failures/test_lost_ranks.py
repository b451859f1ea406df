"""Ranks that die under requests: another one goes on, to the token."""

import asyncio
import re
from dataclasses import replace

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request, prompt_of
from etcd.real_etcd import until
from services.engine.fake import continuation


async def stop_while_it_runs(cluster, name):
    await until(lambda: cluster.ranks[name].engine.load().running)
    await cluster.stop_rank(name)


def ranks_left(caplog):
    """Those that requests were moved away from."""
    return set(re.findall(r"^request_moved .*\bleft=(\S+)", "\n".join(caplog.messages), re.M))


async def test_a_prefill_rank_that_dies_costs_a_retry_and_nothing_else(
    etcd_endpoint, model_dir, cluster_name, caplog
):
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(1, 1), fake_step_s=0.02)
    async with cluster:
        requests = [asyncio.create_task(cluster.generate(prompt_of(i, 200), 6)) for i in range(6)]
        await stop_while_it_runs(cluster, "prefill-0/0")
        for number, request in enumerate(requests):
            tokens, _ = await request
            assert tokens == continuation(prompt_of(number, 200), 6)
        assert ranks_left(caplog) == {"prefill-0/0"}
        await cluster.assert_nothing_held()


async def test_a_decode_rank_that_dies_hands_its_streams_over(etcd_endpoint, model_dir, cluster_name, caplog):
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, decode=(1, 1), fake_step_s=0.01
    ) as cluster:
        requests = [asyncio.create_task(cluster.generate(prompt_of(i), 60)) for i in range(6)]
        await stop_while_it_runs(cluster, "decode-0/0")
        for number, request in enumerate(requests):
            tokens, _ = await request
            assert tokens == continuation(prompt_of(number), 60)
        assert ranks_left(caplog) == {"decode-0/0"}
        await cluster.assert_nothing_held()
        # A new life of the rank joins and is used again.
        await cluster.start_rank("decode", "decode-0", 0)
        await cluster.until_placeable()
        await cluster.generate(prompt_of(9))
        await cluster.assert_nothing_held()


@pytest.mark.long
async def test_a_stream_outlives_more_ranks_than_it_is_tried_on(etcd_endpoint, model_dir, cluster_name):
    """What failed before a placement got on says nothing of the next one, and restarted ranks do again."""
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1, 1), fake_step_s=0.05)
    cluster.router_config = replace(cluster.router_config, max_attempts=2)
    async with cluster:
        tokens = []
        call = cluster.stubs[0].Generate(ids_request(prompt_of(1), 1500, request_id="long"), timeout=120)

        async def read():
            async for response in call:
                tokens.extend(response.token_ids)

        reading = asyncio.create_task(read())

        async def until_it_goes_on():
            seen = len(tokens)
            while len(tokens) < seen + 5 and not reading.done():
                await asyncio.sleep(0.005)
            assert not reading.done(), await reading

        async with asyncio.timeout(100):
            for _ in range(4):
                await until_it_goes_on()
                progress = cluster.routers[0].generator._running["", "long"]
                rank = progress.placed.decision.chosen.decode.id
                await cluster.stop_rank(f"{rank.worker}/{rank.rank}")
                await until_it_goes_on()
                await cluster.start_rank("decode", rank.worker, rank.rank)
                await cluster.until_placeable()
        assert progress.attempts > 4
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert tokens == continuation(prompt_of(1), len(tokens))
        await cluster.assert_nothing_held()


async def test_what_failed_leaves_nothing_to_pay_for(etcd_endpoint, model_dir, cluster_name, subtests):
    with subtests.test("a request that fails for good leaves nothing behind"):
        cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,))
        cluster.router_config = replace(cluster.router_config, max_attempts=1)
        async with cluster:
            await cluster.stop_rank("prefill-0/0")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await cluster.generate(prompt_of(1))
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            (client,) = cluster.routers[0].cluster._connections.clients.values()
            assert not client._streams
            await cluster.assert_nothing_held()
    with subtests.test("a new life does not pay for the old one"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,)) as cluster:
            old = (await cluster.stop_rank("decode-0/0")).address.id
            await cluster.start_rank("decode", "decode-0", 0)
            await cluster.until_placeable()
            cluster.routers[0].cluster.failed(old)  # of a request that hears of the loss only now
            await cluster.generate(prompt_of(1))
