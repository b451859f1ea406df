"""Ranks that are restarted in the middle of transfers: nothing of their last lives is kept."""

import asyncio

import grpc
import pytest

from cluster.harness import FakeCluster
from cluster.pair_of_ranks import Ranks
from services.engine.fake import continuation


@pytest.mark.parametrize(
    ("name", "same_port"),
    [
        ("prefill-0/0", False),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in ("prefill-0/0", "decode-0/0")),
    ],
)
async def test_lives_that_are_over_leave_nothing_behind(
    etcd_endpoint, model_dir, cluster_name, name, same_port
):
    role, worker = name.split("-")[0], name.split("/")[0]
    settings = dict(decode=(1,), fake_step_s=0.005, write_lease_s=1.0)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **settings) as cluster:
        for life in range(2):
            prompts = [[(60 * life + 13 * i + j) % 500 for j in range(300)] for i in range(4)]
            before = Ranks(cluster)
            requests = [asyncio.create_task(cluster.generate(prompt, 10)) for prompt in prompts]
            async with asyncio.timeout(30):
                while not before.transfers.open_transfers:
                    await asyncio.sleep(0.001)
            old = await cluster.stop_rank(name)
            port = int(old.address.endpoint.rpartition(":")[2]) if same_port else 0
            await cluster.start_rank(role, worker, 0, port)
            for prompt, request in zip(prompts, requests, strict=True):
                try:
                    assert (await request)[0] == continuation(prompt, 10)
                except grpc.aio.AioRpcError as error:  # the only rank of its role was away for too long
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
        await cluster.until_placeable()
        await cluster.generate([1, 2, 3])
        ranks = Ranks(cluster)
        async with asyncio.timeout(30):
            while ranks.left() or set(ranks.ties().values()) != {1}:
                await asyncio.sleep(0.01)
        await cluster.assert_nothing_held()
