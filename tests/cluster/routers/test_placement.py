"""These tests show where turns and prompts are placed, the whole way on loopback, with the fake engine."""

import asyncio
import random
from dataclasses import replace

import pytest

from cluster.harness import BLOCK, FakeCluster, ids_request, prompt_of
from services.engine.fake import continuation
from services.router.placement import exclusion
from services.wire.isthmus.v1 import generation_pb2

PAGE_BYTES = BLOCK * 8


async def test_turns_move_their_delta_and_nowhere_is_explained(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, subtests
):
    with subtests.test("five turns move only their delta"):
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
            ids, previous, home = prompt_of(1), 0, None
            for turn in range(5):
                tokens, finish = await cluster.generate(ids, conversation_id="c")
                usage = finish.usage
                assert tokens == continuation(ids, 8)
                assert usage.prompt_tokens == len(ids) == usage.reused_tokens + usage.computed_tokens
                assert usage.prompt_tokens == usage.decode_prefix_len + usage.delta_tokens
                first_page, end_page = usage.decode_prefix_len // BLOCK, -(-len(ids) // BLOCK)
                assert usage.kv_bytes_moved == (end_page - first_page) * PAGE_BYTES
                assert usage.kv_bytes_moved + usage.kv_bytes_saved == end_page * PAGE_BYTES
                if turn:
                    assert usage.decode_prefix_len >= previous - BLOCK
                    assert (finish.placement.decode, usage.drift_tokens) == (home, 0)
                home = finish.placement.decode
                ids = ids + tokens
                previous = len(ids)
                ids = [*ids, 400 + turn, 7]
            await cluster.assert_nothing_held()
    with subtests.test("where no rank can be chosen each says why"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1, 1)) as cluster:
            _, finish = await cluster.generate(prompt_of(1), conversation_id="c")
            monkeypatch.setattr(
                exclusion, "of_rank", lambda rank, standing, asked: f"{rank.id.worker} is out"
            )
            request = ids_request(prompt_of(1), conversation_id="c")
            answer = await cluster.stubs[0].Explain(generation_pb2.ExplainRequest(request=request))
            assert answer.reason == (
                "no decode rank can take the request: 1 decode-0 is out, 1 decode-1 is out"
            )
            assert answer.pinned == finish.placement.decode
            assert [(c.decode.worker, c.prefill.worker, c.excluded, c.chosen) for c in answer.candidates] == [
                ("decode-0", "", "decode-0 is out", False),
                ("decode-1", "", "decode-1 is out", False),
                ("", "prefill-0", "prefill-0 is out", False),
            ]
            (pinned,) = [c.decode for c in answer.candidates if c.pinned]
            assert pinned == answer.pinned


async def test_pins_hold_over_routers_and_workers(etcd_endpoint, model_dir, cluster_name):
    """16 interleaved conversations of 4 turns, each turn to a router at random: >= 99 % come home."""
    rng = random.Random(7)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, routers=2, decode=(2, 2)) as cluster:
        conversations = [prompt_of(i) for i in range(16)]
        homes, at_home, turns = {}, 0, 0
        for turn in range(4):
            order = list(range(16))
            rng.shuffle(order)
            for number in order:
                ids = conversations[number]
                router = rng.randrange(2)
                if turn:  # turns are spaced wider than the index is stale
                    await cluster.until_indexed(homes[number], ids[: previous_len(ids)], router)
                tokens, finish = await cluster.generate(ids, router=router, conversation_id=f"c{number}")
                assert tokens == continuation(ids, 8)
                if turn:
                    turns += 1
                    at_home += finish.placement.decode == homes[number]
                homes[number] = finish.placement.decode
                conversations[number] = [*ids, *tokens, 450 + turn]
        # They did spread. Equal prices are split by chance: one time in 80 a rank of four gets none.
        assert len({(h.worker, h.rank) for h in homes.values()}) >= 3
        assert at_home / turns >= 0.99
        await cluster.assert_nothing_held()


def previous_len(ids):
    """Tokens of the last turn whose KV was stored: all but its newest one, and the new question."""
    return len(ids) - 2


async def test_a_prefix_brings_a_prompt_home_and_is_no_other_tenants(
    etcd_endpoint, model_dir, cluster_name, subtests
):
    with subtests.test("prefix alone brings a prompt home"):
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(4,)) as cluster:
            _, first = await cluster.generate(prompt_of(3, 40))
            await cluster.until_indexed(first.placement.decode, prompt_of(3, 40))
            _, second = await cluster.generate([*prompt_of(3, 40), 1, 2, 3])
            assert second.placement.decode == first.placement.decode
            assert second.placement.reason == "longest_prefix"
            assert second.usage.decode_prefix_len == 40
    with subtests.test("tenants share nothing"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,)) as cluster:
            await cluster.generate(prompt_of(1, 40), tenant="a")
            _, same = await cluster.generate(prompt_of(1, 40), tenant="a")
            _, other = await cluster.generate(prompt_of(1, 40), tenant="b")
            assert same.usage.decode_prefix_len == 40
            assert other.usage.decode_prefix_len == other.usage.prefill_prefix_len == 0


@pytest.mark.parametrize("plan", ["remote", pytest.param("local", marks=pytest.mark.long)])
async def test_many_at_once_are_exact(etcd_endpoint, model_dir, cluster_name, plan):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(2,), plans=(plan,)) as cluster:
        prompts = [prompt_of(0, 16) + prompt_of(i, 3 + i) for i in range(24)]
        answers = await asyncio.gather(*(cluster.generate(p, 12) for p in prompts))
        assert [tokens for tokens, _ in answers] == [continuation(p, 12) for p in prompts]
        await cluster.assert_nothing_held()


@pytest.mark.parametrize(
    "plans",
    [
        ("remote", "local"),
        *(pytest.param((plan,), marks=pytest.mark.long) for plan in ("remote", "local")),
    ],
)
async def test_a_prompt_goes_where_it_fits(etcd_endpoint, model_dir, cluster_name, plans):
    """Ranks may have pools of different sizes; a rank is not to blame for what it cannot hold."""
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, prefill=(1,), decode=(1,), plans=plans, kv_pages=20
    ) as cluster:
        cluster.base = replace(cluster.base, kv_pages=100)
        cluster.shape = {"prefill": (1, 1), "decode": (1, 1)}
        await cluster.start_rank("decode", "decode-1", 0)
        await cluster.start_rank("prefill", "prefill-1", 0)
        await cluster.until_placeable()
        for number in range(4):
            prompt = prompt_of(number, 20 * BLOCK + number)
            tokens, finish = await cluster.generate(prompt)
            assert tokens == continuation(prompt, 8)
            assert finish.placement.decode.worker == "decode-1"
        await cluster.until_placeable()  # nobody was left out for it
        await cluster.assert_nothing_held()
