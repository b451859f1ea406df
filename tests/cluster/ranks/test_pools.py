"""Ranks with pools of different sizes: nobody's answer is shorter for the rank that it was placed on."""

import asyncio
from functools import partial
from importlib import import_module

import grpc
import httpx
import pytest

from cluster.harness import BLOCK, FakeCluster, ids_request
from cluster.metrics_page import samples, value
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.engine import fake
from services.engine.fake import continuation
from services.router.placement.exclusion import TOO_SMALL
from services.router.placement.placer import Placer
from services.router.placement.rank_snapshot import RankSnapshot
from services.router.request import failover
from services.values.rank import RankKey, Role
from services.wire.isthmus.v1 import common_pb2, generation_pb2

LENGTH, CAPACITY = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_CAPACITY
PROMPT = [(7 + i * 5) % 500 for i in range(60)]
HOLDS = (100, 200, 400)  # tokens, of decode-0, decode-1 and decode-2
PLANS = [
    ("remote", "local"),
    *(pytest.param((plan,), marks=pytest.mark.long) for plan in ("remote", "local")),
]
MODEL_TOKENS = 600


@pytest.fixture(autouse=True)
def context(monkeypatch):
    """The model's is longer than any pool but the default one."""
    import_module("services.engine.fake_draft")  # it has a subclass, of the class and not of what follows
    monkeypatch.setattr(fake, "FakeRunner", partial(fake.FakeRunner, max_context_tokens=MODEL_TOKENS))


def pools_of(*num_tokens):
    shape = {"decode": (1,) * len(num_tokens)}
    return shape | {"pools": {f"decode-{i}": tokens // BLOCK for i, tokens in enumerate(num_tokens)}}


@pytest.fixture
def smallest_first(monkeypatch):
    """Of the ranks that hold the prompt the smallest is chosen, whatever it costs."""
    exclusion, holds = RankSnapshot.exclusion, set()

    def of_smallest(snapshot, key, rank):
        if reason := exclusion(snapshot, key, rank):
            return reason
        if snapshot.asked.prompt_tokens < len(PROMPT):
            return ""  # a probe
        smallest = min((tokens for tokens in holds if tokens > snapshot.asked.prompt_tokens), default=0)
        is_larger = rank.role is Role.DECODE and rank.max_context_tokens > smallest
        return "larger than need be" if is_larger else ""

    def seen_by(placer, asked):
        holds.clear()
        holds.update(decode.max_context_tokens for decode in placer._decodes.ranks.values())
        return sight_of(placer, asked)

    sight_of = Placer._snapshot
    monkeypatch.setattr(Placer, "_snapshot", seen_by)
    monkeypatch.setattr(RankSnapshot, "exclusion", of_smallest)


async def generate(cluster, max_tokens, prompt=PROMPT, **sampling):
    """(token ids, Finish); `max_tokens` None: unset."""
    request = ids_request(prompt, max_tokens)
    if max_tokens is None:
        request.sampling.ClearField("max_tokens")
    request.sampling.MergeFrom(common_pb2.SamplingParams(**sampling))
    tokens = []
    async for response in cluster.stubs[0].Generate(request, timeout=60):
        tokens += response.token_ids
    return tokens, response.finish


async def explained(cluster, max_tokens):
    request = generation_pb2.ExplainRequest(request=ids_request(PROMPT, max_tokens))
    candidates = (await cluster.stubs[0].Explain(request)).candidates
    chosen = {c.decode.worker for c in candidates if c.chosen}
    return chosen, {c.decode.worker: c.excluded for c in candidates if c.HasField("decode") and c.excluded}


@pytest.mark.parametrize("plans", PLANS, ids=",".join)
async def test_a_request_goes_where_prompt_and_answer_fit(etcd_endpoint, model_dir, cluster_name, plans):
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, plans=plans, **pools_of(100, 400)
    ) as cluster:
        for number in range(4):
            prompt = [number, *PROMPT]
            tokens, finish = await generate(cluster, 300, prompt)
            assert tokens == continuation(prompt, 300)
            assert (finish.reason, finish.placements[-1].decode.worker) == (LENGTH, "decode-1")
        assert await explained(cluster, 300) == ({"decode-1"}, {"decode-0": TOO_SMALL})
        assert (await explained(cluster, 40))[1] == {}
        assert (await explained(cluster, 3_000))[1] == {}  # it fits nobody
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("plans", PLANS, ids=",".join)
async def test_at_the_end_of_a_pool_a_request_goes_on_in_a_larger_one(
    etcd_endpoint, model_dir, cluster_name, smallest_first, plans
):
    moves_so_far = 0
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, plans=plans, **pools_of(*HOLDS)
    ) as cluster:
        cases = (
            (None, HOLDS[2] - 60, CAPACITY, 2),
            (10_000, HOLDS[2] - 60, CAPACITY, 2),
            (300, 300, LENGTH, 2),
            (HOLDS[0] - 60, HOLDS[0] - 60, LENGTH, 0),  # both ends at once
            (HOLDS[0] - 59, HOLDS[0] - 59, LENGTH, 1),
            (HOLDS[2] - 60, HOLDS[2] - 60, LENGTH, 2),
        )
        for number, (max_tokens, num_tokens, reason, moves) in enumerate(cases):
            prompt = [number, *PROMPT[1:]]
            tokens, finish = await generate(cluster, max_tokens, prompt)
            assert tokens == continuation(prompt, num_tokens), max_tokens
            assert (finish.reason, finish.placements[-1].decode.worker) == (reason, f"decode-{moves}"), (
                max_tokens
            )
            assert finish.usage.completion_tokens == num_tokens
            moves_so_far += moves
            page = await samples(cluster.routers[0], cluster)
            assert value(page, "isthmus_request_moves_total", kind="outgrown") == moves_so_far
        assert value(page, "isthmus_request_moves_total") == moves_so_far
        assert value(page, "isthmus_cut_off_answers_total") == 2
        await cluster.until_placeable()  # nobody was left out for it
        await cluster.assert_nothing_held()


async def test_the_models_context_is_no_lack_of_room_and_http_has_a_word_for_one(
    etcd_endpoint, model_dir, cluster_name, subtests
):
    with subtests.test("the models context is no lack of room"):
        # One rank holds all of it, the other one nearly.
        pools = pools_of(MODEL_TOKENS - BLOCK, 2 * MODEL_TOKENS)
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **pools) as cluster:
            for max_tokens in (None, 5_000):
                tokens, finish = await generate(cluster, max_tokens)
                assert tokens == continuation(PROMPT, MODEL_TOKENS - len(PROMPT))
                assert finish.reason == LENGTH
            # What goes beyond it does not make the smaller pool fit, nor the larger one too small.
            assert await explained(cluster, 5_000) == ({"decode-1"}, {"decode-0": TOO_SMALL})
    with subtests.test("over http an answer that was cut off has openais word and ours"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", **pools_of(100)) as cluster:
            url = f"http://127.0.0.1:{cluster.routers[0].http_port}"
            async with httpx.AsyncClient(base_url=url) as http:
                (model,) = (await http.get("/v1/models")).json()["data"]
                assert model["max_model_len"] == 100
                body = {"prompt": PROMPT, "ignore_eos": True}
                for max_tokens, word in ((5_000, "capacity"), (40, "length")):
                    answer = (
                        await http.post("/v1/completions", json=body | {"max_tokens": max_tokens})
                    ).json()
                    assert answer["usage"]["completion_tokens"] == 40
                    assert answer["choices"][0]["finish_reason"] == "length"
                    assert answer["isthmus"]["finish_reason"] == word


async def test_a_rank_that_ends_leaves_what_the_others_hold(etcd_endpoint, model_dir, cluster_name):
    """What fits there goes on there to the end of its pool; what does not is told to come again."""
    pools = pools_of(100, 400)
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, fake_step_s=0.005, plans=("local",), **pools
    ) as cluster:
        mirror = cluster.routers[0].cluster._mirror
        tokens, long = [], None
        async for response in cluster.stubs[0].Generate(ids_request(PROMPT, 300), timeout=60):
            tokens += response.token_ids
            long = long or asyncio.create_task(generate(cluster, 300, [*PROMPT, *PROMPT]))
            larger = cluster.ranks.get("decode-1/0")
            if larger is not None and larger.engine.load().waiting == 1:
                await cluster.stop_rank("decode-1/0")
                mirror._forget(RankKey("decode-1", 0))  # as routers do when its lease has lapsed
        assert tokens == continuation(PROMPT, HOLDS[0] - len(PROMPT))
        assert response.finish.reason == CAPACITY
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await long
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "1 the prompt is longer than its context" in lost.value.details()


async def wait_for_the_larger(etcd_endpoint, model_dir, cluster_name, monkeypatch, comes_back):
    monkeypatch.setattr(failover, "_STUMBLE_S", 0.01)
    monkeypatch.setattr(failover, "_LARGER_RANK_S", 9.0 if comes_back else 0.02)
    exclusion, prompts = RankSnapshot.exclusion, []

    def stumbles(snapshot, key, rank):
        if rank.id.worker == "decode-1":
            if snapshot.asked.prompt_tokens < 100:
                return "not yet"
            prompts.append(snapshot.asked.prompt_tokens)
            if not comes_back or len(prompts) < 6:
                return "not connected"
        return exclusion(snapshot, key, rank)

    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **pools_of(100, 400)) as cluster:
        monkeypatch.setattr(RankSnapshot, "exclusion", stumbles)
        if comes_back:
            assert (await generate(cluster, 100))[0] == continuation(PROMPT, 100)
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="1 not connected") as lost:
                await generate(cluster, 100)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_larger_rank_that_is_there_is_waited_for(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, subtests
):
    for comes_back in (True, False):
        with subtests.test(comes_back=comes_back), monkeypatch.context() as patching:
            await wait_for_the_larger(
                etcd_endpoint, model_dir, f"{cluster_name}-{comes_back}", patching, comes_back
            )


@pytest.mark.exact
@pytest.mark.parametrize("plans", [("remote",), ("local",)], ids=",".join)
async def test_a_real_answer_that_moves_is_the_references(etcd_endpoint, cluster_name, smallest_first, plans):
    directory = tiny_checkpoint("qwen3")
    settings = {"engine": "torch", "model": str(directory), "num_threads": 1, "plans": plans}
    prompt = list(random_prompt(60, seed=4))
    async with FakeCluster(etcd_endpoint, directory, cluster_name, **settings, **pools_of(*HOLDS)) as cluster:
        tokens, finish = await generate(cluster, 200, prompt)
        count_near_ties(reference_generation(directory, tuple(prompt), 200), tokens)
        assert (len(tokens), finish.placements[-1].decode.worker) == (200, "decode-2")
        hot = {"temperature": 3.0, "seed": 5, "presence_penalty": 0.5}
        moved, _ = await generate(cluster, 200, prompt, **hot)
    async with FakeCluster(etcd_endpoint, directory, f"{cluster_name}-whole", **settings) as cluster:
        assert moved == (await generate(cluster, 200, prompt, **hot))[0]
