"""A worker all of whose ranks end at the same moment, as with its host."""

import asyncio

import pytest

from cluster.harness import FakeCluster
from services.engine.fake import continuation


@pytest.mark.long
async def test_a_worker_of_many_ranks_that_ends_loses_no_request(etcd_endpoint, cluster_name, model_dir):
    """What ran there goes to another worker at once, and not from one of its dying ranks to the next."""
    cluster = FakeCluster(
        etcd_endpoint, model_dir, cluster_name, decode=(6, 1), max_running_requests=64, fake_step_s=0.03
    )
    async with cluster:
        prompts = [[number, *range(20)] for number in range(30)]
        asked = [asyncio.create_task(cluster.generate(prompt, 100)) for prompt in prompts]
        dying = [name for name in cluster.ranks if name.startswith("decode-0/")]
        async with asyncio.timeout(20):
            while not all(cluster.ranks[name].engine.load().running for name in dying):
                await asyncio.sleep(0.01)
        async with asyncio.TaskGroup() as deaths:
            for name in dying:  # not quite at the same moment: the router hears of one after the other
                deaths.create_task(cluster.stop_rank(name))
                await asyncio.sleep(0.05)
        answers = await asyncio.gather(*asked)
        assert [tokens for tokens, _ in answers] == [continuation(prompt, 100) for prompt in prompts]
        ways = [[placement.decode.worker for placement in finish.placements] for _, finish in answers]
        assert all(way[-1] == "decode-1" and way.count("decode-0") <= 1 for way in ways), ways
        assert all(finish.usage.completion_tokens == 100 for _, finish in answers)
