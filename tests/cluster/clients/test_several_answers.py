"""Several answers to one prompt: it is computed once, and its pages are held once."""

import asyncio
import logging
import re
from dataclasses import replace

import grpc
import pytest

from cluster.answers import answers_of, running_at
from cluster.harness import BLOCK, FakeCluster, ids_request, prompt_of
from cluster.metrics_page import samples, value
from services.engine.fake import continuation, parse_carried
from services.wire.isthmus.v1 import common_pb2, generation_pb2

PROMPT = prompt_of(1, 203)  # 50 pages and three quarters of one
FULL = len(PROMPT) // BLOCK
TAIL = len(PROMPT) - FULL * BLOCK
SHAPE = {"decode": (1, 1), "fake_step_s": 0.005}


@pytest.mark.parametrize(
    "plans",
    [("remote",), *(pytest.param(p, marks=pytest.mark.long) for p in (("local",), ("remote", "local")))],
    ids="-".join,
)
async def test_a_prompt_is_computed_once_and_its_pages_are_held_once(
    etcd_endpoint, model_dir, cluster_name, plans, caplog
):
    caplog.set_level(logging.INFO, "services.router.request.story")
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, plans=plans, **SHAPE) as cluster:
        asked = asyncio.create_task(answers_of(cluster, ids_request(PROMPT, 40, n=8, request_id="r")))
        books = await (await running_at(cluster, 8)).engine.books()
        # All 8 go on alike, so that even their own pages are held once when they are full.
        assert FULL <= books.locked <= FULL + 40 // BLOCK + 1
        assert books.private <= 8 * 2  # of each the page that is written, and one that comes in
        answers = await asked
        assert [answer.token_ids for answer in answers] == [continuation(PROMPT, 40)] * 8
        assert len({rank for answer in answers for rank in answer.ranks}) == 1
        usages = [answer.finish.usage for answer in answers]
        assert [usage.computed_tokens for usage in usages] == [len(PROMPT)] + 7 * [TAIL]
        assert all(usage.prompt_tokens == len(PROMPT) for usage in usages)
        assert sum(usage.delta_tokens for usage in usages) <= len(PROMPT) + 7 * TAIL
        assert [a.finish.placement.reason == "same_prompt" for a in answers] == [False] + 7 * [True]
        await cluster.assert_nothing_held()
    # A request is told once, and each answer in a line of its own.
    (told,) = (line for line in caplog.messages if line.startswith("request_finished"))
    assert "request_id=r answers=8 outcome=finished" in told and "completion_tokens=320" in told
    lines = [line for line in caplog.messages if line.startswith("answer_finished")]
    assert sorted(int(re.search(r"answer=(\d+)", line)[1]) for line in lines) == list(range(8))


@pytest.mark.long
async def test_an_abort_ends_all_answers_wherever_they_are(etcd_endpoint, model_dir, cluster_name):
    """Those that wait for the first one, too."""
    slow = {**SHAPE, "fake_prompt_token_s": 0.002}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **slow) as cluster:
        for running in (1, 8):
            ids = prompt_of(running, 203)
            asked = asyncio.create_task(answers_of(cluster, ids_request(ids, 400, n=8, request_id="r")))
            await running_at(cluster, running, roles=("prefill", "decode"))
            abort = await cluster.stubs[0].Abort(generation_pb2.AbortRequest(request_id="r"))
            assert abort.found
            answers = await asked
            assert {a.finish.reason for a in answers} == {common_pb2.FINISH_REASON_ABORTED}
            assert len(answers) == 8
            await cluster.assert_nothing_held()


@pytest.mark.long
@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_and_a_deadline_end_all_answers(
    etcd_endpoint, model_dir, cluster_name, leaves
):
    slow = {**SHAPE, "fake_step_s": 0.05}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **slow) as cluster:
        timeout = 30 if leaves else 1.5
        asked = asyncio.create_task(answers_of(cluster, ids_request(PROMPT, 100, n=8), timeout))
        await running_at(cluster, 8)
        if leaves:
            asked.cancel()
            await asyncio.wait([asked])
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await asked
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.assert_nothing_held()


@pytest.mark.long
async def test_an_error_of_one_answer_is_the_requests(etcd_endpoint, model_dir, cluster_name):
    """It says so, instead of answering fewer; the others are given up."""
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), fake_step_s=0.01)
    cluster.router_config = replace(cluster.router_config, max_attempts=1)
    async with cluster:
        asked = asyncio.create_task(answers_of(cluster, ids_request(PROMPT, 400, n=4)))
        await running_at(cluster, 4)
        await cluster.stop_rank("decode-0/0")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await asked
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not cluster.routers[0].cluster._placer.outcomes._balance._flights
        await cluster.assert_nothing_held()


async def test_the_best_are_told_when_all_have_ended_and_counted_once(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **SHAPE) as cluster:
        answers = await answers_of(cluster, ids_request(PROMPT, 6, n=2, best_of=5))
        assert [answer.token_ids for answer in answers] == [continuation(PROMPT, 6)] * 2
        assert [answer.responses for answer in answers] == [1, 1]
        assert [answer.logprobs for answer in answers] == [[], []]  # not asked for
        first, last = (answer.finish for answer in answers)
        assert not first.HasField("left_out")
        assert last.left_out.completion_tokens == 3 * 6
        assert last.left_out.computed_tokens == 3 * TAIL
        await cluster.assert_nothing_held()
        await cluster.generate(prompt_of(2), 5)
        page = await samples(cluster.routers[0], cluster)
        assert (
            value(page, "isthmus_requests_received_total") == value(page, "isthmus_ttft_seconds_count") == 2
        )
        assert value(page, "isthmus_answers_total") == 6
        assert value(page, "isthmus_completion_tokens_total") == 5 * 6 + 5
        assert value(page, "isthmus_request_output_tokens_sum") == 5 * 6 + 5
        computed = len(PROMPT) + 4 * TAIL + len(prompt_of(2))
        assert value(page, "isthmus_computed_tokens_total") == computed
        assert value(page, "isthmus_prompt_tokens_total") == computed


@pytest.mark.long
@pytest.mark.parametrize("plan", ["remote", pytest.param("local", marks=pytest.mark.slow)])
async def test_a_pool_that_does_not_hold_all_of_them_serves_them_one_after_the_other(
    etcd_endpoint, model_dir, cluster_name, plan
):
    """51 pages of the prompt and 8 x 25 of answers, in a pool of 120: they wait, and are retracted."""
    pools = {"decode-0": 120}
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), plans=(plan,), pools=pools)
    async with cluster:
        for seed in range(3):
            ids = prompt_of(seed, 203)
            answers = await answers_of(cluster, ids_request(ids, 100, n=8), timeout=60)
            assert [answer.token_ids for answer in answers] == [continuation(ids, 100)] * 8
            await cluster.assert_nothing_held()


@pytest.mark.long
@pytest.mark.parametrize("plan", ["remote", pytest.param("local", marks=pytest.mark.slow)])
async def test_a_rank_that_caches_nothing_computes_it_for_each(etcd_endpoint, model_dir, cluster_name, plan):
    shape = {"decode": (1, 1), "plans": (plan,), "decode_cache": "off", "prefill_cache": "off"}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        answers = await answers_of(cluster, ids_request(PROMPT, 8, n=3))
        assert [answer.token_ids for answer in answers] == [continuation(PROMPT, 8)] * 3
        assert [answer.finish.usage.computed_tokens for answer in answers] == [len(PROMPT)] * 3
        await cluster.assert_nothing_held()


@pytest.mark.long
@pytest.mark.parametrize("plan", ["remote", pytest.param("local", marks=pytest.mark.slow)])
async def test_with_states_they_go_on_from_the_last_checkpoint(etcd_endpoint, model_dir, cluster_name, plan):
    carried = "state,window:6"
    shape = {**SHAPE, "plans": (plan,), "fake_carried": carried}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        answers = await answers_of(cluster, ids_request(PROMPT, 8, n=6))
        expected = continuation(PROMPT, 8, parse_carried(carried))
        assert [answer.token_ids for answer in answers] == [expected] * 6
        computed = [answer.finish.usage.computed_tokens for answer in answers]
        assert computed == [len(PROMPT)] + 5 * [TAIL]
        await cluster.assert_nothing_held()


@pytest.mark.long
@pytest.mark.slow
async def test_as_many_as_there_may_be(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1, 1), kv_pages=4096) as cluster:
        answers = await answers_of(cluster, ids_request(PROMPT, 8, n=128), timeout=60)
        assert [answer.token_ids for answer in answers] == [continuation(PROMPT, 8)] * 128
        assert sum(a.finish.usage.computed_tokens for a in answers) == len(PROMPT) + 127 * TAIL
        await cluster.assert_nothing_held()
