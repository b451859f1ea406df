"""A page that comes changed costs its request a move, and nobody a wrong token."""

import asyncio

import pytest

from cluster.harness import FakeCluster
from cluster.metrics_page import samples, value
from services.engine import choose
from services.engine.fake import continuation
from transfer.spoiling_transport import SpoilingTransport

PROMPTS = [[(i * 7 + n) % 500 for i in range(41)] for n in range(6)]


@pytest.fixture
def spoiling(monkeypatch):
    monkeypatch.setattr(SpoilingTransport, "spoils", 0)
    monkeypatch.setattr(choose, "open_transport", lambda name, nixl: SpoilingTransport())
    return SpoilingTransport


@pytest.mark.long
async def test_a_transfer_is_made_again(etcd_endpoint, model_dir, cluster_name, spoiling, subtests):
    for number, prefill in enumerate([(1, 1), (1,)]):
        with subtests.test(prefill=prefill):
            async with FakeCluster(
                etcd_endpoint, model_dir, f"{cluster_name}-{number}", prefill=prefill, decode=(1,)
            ) as cluster:
                await all_are_right(cluster, spoiling)


async def test_or_the_prompt_is_computed_at_home(
    etcd_endpoint, model_dir, cluster_name, spoiling, remote_looks_cheaper
):
    plans = ("remote", "local")
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, plans=plans, decode=(1,)) as cluster:
        await all_are_right(cluster, spoiling)


async def all_are_right(cluster, spoiling):
    spoiling.spoils = 1
    answers = await asyncio.gather(*(cluster.generate(prompt) for prompt in PROMPTS))
    assert [tokens for tokens, _ in answers] == [continuation(prompt, 8) for prompt in PROMPTS]
    await cluster.assert_nothing_held()
    decode = await samples(cluster.ranks["decode-0/0"], cluster)
    router = await samples(cluster.routers[0], cluster)
    assert value(decode, "isthmus_kv_digest_mismatches_total") == 1
    assert value(decode, "isthmus_transfer_failures_total") == 1
    assert value(decode, "isthmus_kv_digested_pages_total") > 0
    assert value(router, "isthmus_request_moves_total", kind="retry") == 1
