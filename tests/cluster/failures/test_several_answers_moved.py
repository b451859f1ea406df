"""A rank dies while it gives several answers: they go on, and the next one computes their prompt once."""

import asyncio

import pytest

from cluster.answers import answers_of, running_at
from cluster.harness import BLOCK, FakeCluster, ids_request, prompt_of
from etcd.real_etcd import until
from services.engine.fake import continuation

PROMPT = prompt_of(3, 203)
FULL = len(PROMPT) // BLOCK


@pytest.mark.parametrize(
    "plans", [pytest.param(("remote",), marks=pytest.mark.long), ("local",)], ids="-".join
)
async def test_the_prompt_is_computed_once_where_they_go_on(etcd_endpoint, model_dir, cluster_name, plans):
    shape = {"decode": (1, 1), "fake_step_s": 0.01}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, plans=plans, **shape) as cluster:
        answers = {}
        asked = asyncio.create_task(answers_of(cluster, ids_request(PROMPT, 80, n=6), answers=answers))
        left = await running_at(cluster, 6)
        await until(lambda: len(answers) == 6)
        await cluster.stop_rank(f"{left.address.id.worker}/0")
        books = await (await running_at(cluster, 6)).engine.books()
        assert FULL <= books.locked <= FULL + 80 // BLOCK + 1
        assert books.private <= 6 * 2
        answers = await asked
        assert [answer.token_ids for answer in answers] == [continuation(PROMPT, 80)] * 6
        assert all(len(set(answer.ranks)) == 2 for answer in answers)
        later = [answer.finish.placements[1].usage for answer in answers]
        assert sum(usage.decode_prefix_len < FULL * BLOCK for usage in later) == 1
        assert sum(usage.delta_tokens >= FULL * BLOCK for usage in later) == (plans == ("remote",))
        await cluster.assert_nothing_held()


@pytest.mark.long
async def test_a_prefill_rank_that_dies_under_the_first_costs_the_others_nothing(
    etcd_endpoint, model_dir, cluster_name
):
    shape = {"prefill": (1, 1), "decode": (1, 1), "fake_prompt_token_s": 0.002}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        asked = asyncio.create_task(answers_of(cluster, ids_request(PROMPT, 8, n=4)))
        left = await running_at(cluster, 1, roles=("prefill",))
        await cluster.stop_rank(f"{left.address.id.worker}/0")
        answers = await asked
        assert [answer.token_ids for answer in answers] == [continuation(PROMPT, 8)] * 4
        usages = [answer.finish.usage for answer in answers]
        assert [usage.computed_tokens for usage in usages] == [len(PROMPT)] + 3 * [len(PROMPT) - FULL * BLOCK]
        await cluster.assert_nothing_held()
