"""Prompts whose KV another rank holds, the whole way on loopback: pulled, learned from, never a failure."""

import asyncio
from dataclasses import replace

from cluster.harness import BLOCK, FakeCluster, prompt_of
from cluster.metrics_page import samples, value
from services.cli import drain
from services.engine.fake import continuation
from services.engine.paged.pulls import Pulls, Refused
from services.values.rank import RankKey

SLOW = {"fake_prompt_token_s": 0.002}  # A pull pays, then.
HOME = RankKey("decode-0", 0)


def through(cluster: FakeCluster) -> list[str]:
    return [f"--router=127.0.0.1:{cluster.routers[0].server.port}"]


async def converse(cluster: FakeCluster, ids: list[int], num_turns: int) -> list:
    """Long answers to short questions; each turn's Finish."""
    finishes = []
    for turn in range(num_turns):
        tokens, finish = await cluster.generate(ids, max_tokens=60)
        assert tokens == continuation(ids, 60)
        assert finish.usage.prompt_tokens == len(ids)
        assert finish.usage.reused_tokens + finish.usage.computed_tokens == len(ids)
        await cluster.until_indexed(finish.placement.decode, [*ids, *tokens[:-1]])
        finishes.append(finish)
        ids = [*ids, *tokens, 400 + turn, 7]
    return finishes


async def test_prefill_pulls_what_decode_generated(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), **SLOW) as cluster:
        first, *later = await converse(cluster, prompt_of(1), 3)
        assert first.usage.pulled_tokens == 0 and not first.placement.HasField("source")
        for finish in later:
            usage, placement = finish.usage, finish.placement
            assert placement.source == placement.decode and not placement.pull_refused
            assert usage.pulled_tokens >= 60 - BLOCK and usage.computed_tokens <= 3 + BLOCK
            assert usage.pulled_bytes == 8 * usage.pulled_tokens
            assert placement.predicted_reused_tokens <= usage.reused_tokens
            assert 0 < finish.stages.pull_s < finish.stages.first_token_s
        shown = await samples(cluster.routers[0], cluster)
        assert value(shown, "isthmus_pulls_total", result="pulled") == 2
        pulled_tokens = sum(finish.usage.pulled_tokens for finish in later)
        assert value(shown, "isthmus_pulled_tokens_total") == pulled_tokens
        assert value(shown, "isthmus_delivered_hit_tokens_total", role="prefill") < pulled_tokens
        assert cluster.routers[0].cluster.trust(HOME) == 1.0
        await cluster.assert_nothing_held()


async def refuse(etcd_endpoint, model_dir, cluster_name, monkeypatch, word, held_tokens):
    monkeypatch.setattr(Pulls, "grant", lambda *asked: Refused(word, held_tokens or 0))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), **SLOW) as cluster:
        _, second, third = await converse(cluster, prompt_of(1), 3)
        usage, placement = second.usage, second.placement
        assert (placement.pull_refused, usage.pulled_tokens, usage.pulled_bytes) == (word, 0, 0)
        assert placement.source == placement.decode and len(second.placements) == 1
        assert usage.computed_tokens > 60
        shown = await samples(cluster.routers[0], cluster)
        assert value(shown, "isthmus_pulls_total", result=word) >= 1
        assert value(shown, "isthmus_request_moves_total") == 0
        if word == "busy":  # It is left alone for a second.
            assert not third.placement.HasField("source")
        else:
            assert cluster.routers[0].cluster.trust(HOME) < 1.0
        await cluster.assert_nothing_held()


async def test_a_source_that_refuses_costs_no_failure(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, subtests
):
    for word, held_tokens in [("busy", None), ("evicted", 8)]:
        with subtests.test(word), monkeypatch.context() as patching:
            await refuse(etcd_endpoint, model_dir, f"{cluster_name}-{word}", patching, word, held_tokens)


async def test_a_router_can_be_told_to_name_none(etcd_endpoint, model_dir, cluster_name):
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), **SLOW)
    cluster.router_config = replace(cluster.router_config, pull="off")
    async with cluster:
        for finish in await converse(cluster, prompt_of(1), 2):
            assert finish.usage.pulled_tokens == 0 and not finish.placement.HasField("source")


async def test_a_conversation_whose_home_drains_is_pulled_after(etcd_endpoint, model_dir, cluster_name):
    shape = dict(plans=("local",), decode=(1, 1), **SLOW)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        ids = prompt_of(1, length=101)
        tokens, first = await cluster.generate(ids, conversation_id="c")
        home = first.placement.decode
        flags = ["--hand-over-s=0", *through(cluster)]  # Else the other rank has it before it is asked.
        assert await asyncio.to_thread(drain.run, [f"{home.worker}/{home.rank}", *flags]) == 0
        ids += tokens
        tokens, second = await cluster.generate(ids, conversation_id="c")
        assert tokens == continuation(ids, 8)
        assert second.placement.decode != home and second.placement.source == home
        assert second.usage.pulled_tokens == second.usage.decode_prefix_len >= 108 - BLOCK
        assert second.usage.computed_tokens <= 1 + BLOCK
        await cluster.assert_nothing_held()
