"""Usage, placements and totals of requests that move, beside what the ranks themselves counted."""

import asyncio

import pytest

from cluster.harness import FakeCluster, ids_request
from cluster.metrics_page import samples, value
from services.engine.fake import continuation
from services.router.cluster import Cluster
from services.values.rank import Plan
from services.wire.isthmus.v1 import common_pb2

PROMPT = list(range(1, 30))
PAGE_BYTES, PAGE = 4 * 8, 4


def check(usage, plan):
    assert usage.prompt_tokens == usage.reused_tokens + usage.computed_tokens
    all_bytes = -(-usage.prompt_tokens // PAGE) * PAGE_BYTES
    assert usage.kv_bytes_moved + usage.kv_bytes_saved == all_bytes
    if plan == common_pb2.PLAN_REMOTE:
        assert usage.prompt_tokens == usage.decode_prefix_len + usage.delta_tokens
        assert usage.kv_bytes_moved == all_bytes - usage.decode_prefix_len // PAGE * PAGE_BYTES
    else:
        assert usage.delta_tokens == usage.kv_bytes_moved == 0


@pytest.mark.parametrize(
    "plans",
    [
        (Plan.LOCAL, Plan.REMOTE),
        *(pytest.param((Plan.REMOTE, plan), marks=pytest.mark.long) for plan in Plan),
    ],
)
async def test_a_request_that_moves_is_accounted_for(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, plans
):
    allowed = [plans[0]]
    monkeypatch.setattr(Cluster, "_plans", lambda cluster: frozenset(allowed))
    shape = {"decode": (1, 1), "plans": ("remote", "local"), "fake_step_s": 0.01}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        tokens, received, stopping = [], {}, None
        async for response in cluster.stubs[0].Generate(ids_request(PROMPT, 40), timeout=60):
            tokens += response.token_ids
            if len(tokens) > 5 and stopping is None:
                allowed[0] = plans[1]
                (first,) = [n for n, r in cluster.ranks.items() if "decode" in n and r.engine.load().running]
                received[first] = await samples(cluster.ranks[first], cluster)
                stopping = asyncio.create_task(cluster.stop_rank(first))
        await stopping
        router = await samples(cluster.routers[0], cluster)
        (second,) = [name for name in cluster.ranks if "decode" in name]
        received[second] = await samples(cluster.ranks[second], cluster)
    finish = response.finish
    assert tokens == continuation(PROMPT, 40)

    assert [f"{p.decode.worker}/{p.decode.rank}" for p in finish.placements] == [first, second]
    for placement, plan in zip(finish.placements, plans, strict=True):
        assert common_pb2.Plan.Name(placement.plan) == f"PLAN_{plan.value.upper()}"
        check(placement.usage, placement.plan)
        rank = f"{placement.decode.worker}/{placement.decode.rank}"
        counted = value(received[rank], "isthmus_decode_received_bytes_total")
        assert placement.usage.kv_bytes_moved == counted
    began, ended = (placement.usage for placement in finish.placements)
    assert ended.prompt_tokens == len(PROMPT) + began.completion_tokens
    assert began.completion_tokens + ended.completion_tokens == 40

    assert finish.placement == finish.placements[0]
    check(finish.usage, finish.placement.plan)
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 40)
    totals = finish.totals
    assert totals.kv_bytes_moved == began.kv_bytes_moved + ended.kv_bytes_moved > 0
    assert totals.kv_bytes_saved == began.kv_bytes_saved + ended.kv_bytes_saved
    assert totals.prompt_tokens == totals.reused_tokens + totals.computed_tokens
    # What is billed is the first placement's; bytes are all that crossed.
    assert value(router, "isthmus_prompt_tokens_total") == finish.usage.prompt_tokens
    assert value(router, "isthmus_computed_tokens_total") == finish.usage.computed_tokens
    assert value(router, "isthmus_kv_moved_bytes_total") == totals.kv_bytes_moved
    assert value(router, "isthmus_kv_saved_bytes_total") == totals.kv_bytes_saved


async def test_what_is_carried_is_told_apart_and_counted(etcd_endpoint, model_dir, cluster_name):
    """Of a model with a window of 6 tokens and a state: both come with each transfer, a full hit's too."""
    groups = {"fake_carried": "window:6,state", "decode": (1,)}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **groups) as cluster:
        answers = [await cluster.generate(prompt) for prompt in (PROMPT, PROMPT, PROMPT[:24])]
        decode = await samples(cluster.ranks["decode-0/0"], cluster)
        prefill = await samples(cluster.ranks["prefill-0/0"], cluster)
        router = await samples(cluster.routers[0], cluster)
    carried, finishes = {"sliding_window": 2 * PAGE_BYTES, "recurrent": 8}, [finish for _, finish in answers]
    for finish, moved_pages, all_pages in zip(finishes, (8, 1, 0), (8, 8, 6), strict=True):
        usage = finish.usage
        assert usage.carried_bytes == carried
        assert usage.kv_bytes_moved == moved_pages * PAGE_BYTES + sum(carried.values())
        assert usage.kv_bytes_saved == (all_pages - moved_pages) * PAGE_BYTES
    for kind, size_bytes in carried.items():
        assert value(decode, "isthmus_decode_carried_bytes_total", kind=kind) == 3 * size_bytes
    moved = sum(finish.usage.kv_bytes_moved for finish in finishes)
    assert value(decode, "isthmus_decode_received_bytes_total") == moved
    assert value(prefill, "isthmus_prefill_sent_bytes_total") == moved
    assert value(router, "isthmus_kv_moved_bytes_total") == moved
