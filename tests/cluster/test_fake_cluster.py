"""The whole way on loopback, the fake engine computing: placement, pins, failures, bad input, leaks."""

import asyncio
import random
import re
from dataclasses import replace

import grpc
import pytest

from cluster.harness import BLOCK, FakeCluster, ids_request
from cluster.metrics_page import moves
from etcd.real_etcd import client, until
from services.engine.fake import continuation
from services.index.keys import ClusterKeys
from services.router.placement import exclusion
from services.router.text.prompt import PromptEncoder
from services.wire.isthmus.v1 import common_pb2, generation_pb2

PAGE_BYTES = BLOCK * 8


def prompt_of(conversation, length=21):
    return [(conversation * 37 + i * 5) % 500 for i in range(length)]


async def test_five_turns_move_only_their_delta(etcd_endpoint, model_dir, cluster_name):
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


async def test_pins_hold_over_routers_and_workers(etcd_endpoint, model_dir, cluster_name):
    """20 interleaved conversations of 5 turns, each turn to a router at random: >= 99 % come home."""
    rng = random.Random(7)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, routers=2, decode=(2, 2)) as cluster:
        conversations = [prompt_of(i) for i in range(20)]
        homes, at_home, turns = {}, 0, 0
        for turn in range(5):
            order = list(range(20))
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


async def test_prefix_alone_brings_a_prompt_home(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(4,)) as cluster:
        _, first = await cluster.generate(prompt_of(3, 40))
        await cluster.until_indexed(first.placement.decode, prompt_of(3, 40))
        _, second = await cluster.generate([*prompt_of(3, 40), 1, 2, 3])
        assert second.placement.decode == first.placement.decode
        assert second.placement.reason == "longest_prefix"
        assert second.usage.decode_prefix_len == 40


async def test_tenants_share_nothing(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        await cluster.generate(prompt_of(1, 40), tenant="a")
        _, same = await cluster.generate(prompt_of(1, 40), tenant="a")
        _, other = await cluster.generate(prompt_of(1, 40), tenant="b")
        assert same.usage.decode_prefix_len == 40
        assert other.usage.decode_prefix_len == other.usage.prefill_prefix_len == 0


@pytest.mark.parametrize("plan", ["remote", "local"])
async def test_many_at_once_are_exact(etcd_endpoint, model_dir, cluster_name, plan):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(2,), plans=(plan,)) as cluster:
        prompts = [prompt_of(0, 16) + prompt_of(i, 3 + i) for i in range(24)]
        answers = await asyncio.gather(*(cluster.generate(p, 12) for p in prompts))
        assert [tokens for tokens, _ in answers] == [continuation(p, 12) for p in prompts]
        await cluster.assert_nothing_held()


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
                progress = cluster.routers[0].generator._running["long"]
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


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1, 0.3])
async def test_a_client_that_leaves_frees_everything(etcd_endpoint, model_dir, cluster_name, after_s):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_step_s=0.05) as cluster:
        # Left alone they would go on for 20 s: longer than anybody waits below.
        calls = [cluster.stubs[0].Generate(ids_request(prompt_of(i, 120), 400)) for i in range(4)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        await asyncio.wait(reads, timeout=after_s)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        async with asyncio.timeout(5):
            while cluster.routers[0].generator.num_running:
                await asyncio.sleep(0.01)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("timeout_s", [8e9, 9e9, 1e300, None])
async def test_far_deadlines_are_not_taken_for_past_ones(etcd_endpoint, model_dir, cluster_name, timeout_s):
    """As they come over HTTP; None: the router's own limit, as far away."""
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,))
    cluster.router_config = replace(cluster.router_config, request_timeout_s=9e9)
    async with cluster:
        tokens = []
        async for response in cluster.routers[0].generator.generate(ids_request(prompt_of(1)), timeout_s):
            tokens.extend(response.token_ids)
        assert tokens == continuation(prompt_of(1), 8)
        assert cluster.routers[0].generator.time_limit_s(timeout_s) < 4e7
        await cluster.assert_nothing_held()


async def test_deadlines_reach_the_ranks(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_step_s=0.02) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await cluster.generate(prompt_of(1, 120), 400, timeout=0.5)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.assert_nothing_held()


async def test_abort_ends_a_stream_with_its_reason(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_step_s=0.02) as cluster:
        call = cluster.stubs[0].Generate(ids_request(prompt_of(1), 400, request_id="mine"))
        await call.read()
        answer = await cluster.stubs[0].Abort(generation_pb2.AbortRequest(request_id="mine"))
        assert answer.found
        last = None
        while (response := await call.read()) is not grpc.aio.EOF:
            last = response
        assert last.finish.reason == common_pb2.FINISH_REASON_ABORTED
        assert not (await cluster.stubs[0].Abort(generation_pb2.AbortRequest(request_id="mine"))).found
        await cluster.assert_nothing_held()


BAD = {
    "empty prompt": (ids_request([]), "INVALID_ARGUMENT", "token_ids"),
    "no prompt": (generation_pb2.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    "too long": (ids_request([1] * 3000), "INVALID_ARGUMENT", "prompt"),
    "unknown model": (ids_request([1], model="gpt-9"), "NOT_FOUND", "model"),
    "id out of range": (ids_request([1, 512]), "INVALID_ARGUMENT", "token_ids.ids[1]"),
    "negative max_tokens": (ids_request([1], -1), "INVALID_ARGUMENT", "max_tokens"),
    "nan temperature": (
        generation_pb2.GenerateRequest(
            text="a", sampling=common_pb2.SamplingParams(temperature=float("nan"))
        ),
        "INVALID_ARGUMENT",
        "temperature",
    ),
    "10 MB of text": (generation_pb2.GenerateRequest(text="a" * 10_000_000), "INVALID_ARGUMENT", "text"),
    "unknown role": (
        generation_pb2.GenerateRequest(
            chat=generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="wizard", content="x")])
        ),
        "INVALID_ARGUMENT",
        "role",
    ),
    "long request id": (ids_request([1], request_id="x" * 200), "INVALID_ARGUMENT", "request_id"),
}


async def test_bad_input_is_named_and_costs_nothing(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), fake_step_s=0.005) as cluster:
        for name, (request, code, field) in BAD.items():
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                async for _ in cluster.stubs[0].Generate(request):
                    pass
            assert failure.value.code().name == code, name
            assert field in failure.value.details(), (name, failure.value.details())
        call = cluster.stubs[0].Generate(ids_request(prompt_of(1), 100, request_id="twice"))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await cluster.generate(prompt_of(2), request_id="twice")
        assert failure.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "twice" in failure.value.details()
        call.cancel()
        tokens, _ = await cluster.generate(prompt_of(2))
        assert tokens == continuation(prompt_of(2), 8)
        await cluster.assert_nothing_held()


async def test_a_request_id_may_be_used_again_at_once(etcd_endpoint, model_dir, cluster_name):
    """The rank may still be ending the first use: what it says of that is not the second one's."""
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, routers=2, decode=(1,)) as cluster:
        for number in range(20):
            call = cluster.stubs[0].Generate(ids_request(prompt_of(number), 100, request_id="same"))
            await call.read()
            call.cancel()
            while cluster.routers[0].generator.num_running:
                await asyncio.sleep(0)
            again = prompt_of(number + 50)
            tokens, finish = await cluster.generate(again, request_id="same")
            assert tokens == continuation(again, 8)
            assert finish.reason == common_pb2.FINISH_REASON_LENGTH
        # Routers do not know each other's ids, and need not.
        both = [cluster.generate(prompt_of(i), router=i, request_id="same") for i in range(2)]
        assert [tokens for tokens, _ in await asyncio.gather(*both)] == [
            continuation(prompt_of(i), 8) for i in range(2)
        ]
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("plans", [("remote",), ("remote", "local"), ("local",)])
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


async def test_an_abort_before_the_first_rank_ends_the_stream_with_its_reason(
    etcd_endpoint, model_dir, cluster_name, monkeypatch
):
    encoding, go_on = asyncio.Event(), asyncio.Event()
    encode = PromptEncoder.encode

    async def slow(self, request):
        encoding.set()
        await go_on.wait()
        return await encode(self, request)

    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        monkeypatch.setattr(PromptEncoder, "encode", slow)
        running = asyncio.create_task(cluster.generate(prompt_of(1), request_id="mine"))
        await encoding.wait()
        assert (await cluster.stubs[0].Abort(generation_pb2.AbortRequest(request_id="mine"))).found
        go_on.set()
        tokens, finish = await running
        assert (tokens, finish.reason) == ([], common_pb2.FINISH_REASON_ABORTED)


async def test_a_request_that_fails_for_good_leaves_nothing_behind(etcd_endpoint, model_dir, cluster_name):
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


async def test_where_no_rank_can_be_chosen_each_says_why(etcd_endpoint, model_dir, cluster_name, monkeypatch):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1, 1)) as cluster:
        _, finish = await cluster.generate(prompt_of(1), conversation_id="c")
        monkeypatch.setattr(exclusion, "of_rank", lambda rank, standing, asked: f"{rank.id.worker} is out")
        request = ids_request(prompt_of(1), conversation_id="c")
        answer = await cluster.stubs[0].Explain(generation_pb2.ExplainRequest(request=request))
        assert answer.reason == ("no decode rank can take the request: 1 decode-0 is out, 1 decode-1 is out")
        assert answer.pinned == finish.placement.decode
        assert [(c.decode.worker, c.prefill.worker, c.excluded, c.chosen) for c in answer.candidates] == [
            ("decode-0", "", "decode-0 is out", False),
            ("decode-1", "", "decode-1 is out", False),
            ("", "prefill-0", "prefill-0 is out", False),
        ]
        (pinned,) = [c.decode for c in answer.candidates if c.pinned]
        assert pinned == answer.pinned


async def test_a_new_life_does_not_pay_for_the_old_one(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        old = (await cluster.stop_rank("decode-0/0")).address.id
        await cluster.start_rank("decode", "decode-0", 0)
        await cluster.until_placeable()
        cluster.routers[0].cluster.failed(old)  # of a request that hears of the loss only now
        await cluster.generate(prompt_of(1))


async def test_a_prefill_rank_that_drains_costs_nobody_a_retry(
    etcd_endpoint, model_dir, cluster_name, monkeypatch
):
    """It says so before it refuses; until the routers have heard, it takes what they send."""
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, prefill=(1, 1)) as cluster:
        router, leaving = cluster.routers[0], cluster.ranks["prefill-0/0"]
        key = leaving.address.id.key

        stopping, answered = asyncio.Event(), [0, 0, 0]

        async def router_has_heard_and_what_it_sent_before_has_come():
            async with asyncio.timeout(20):
                while not router.mirror.ranks[key].draining:
                    await asyncio.sleep(0.005)
                before = list(answered)
                while any(now < then + 2 for now, then in zip(answered, before, strict=True)):
                    await asyncio.sleep(0.005)

        async def keep_asking(asker):
            while not stopping.is_set():
                prompt = prompt_of(100 * asker + answered[asker])
                tokens, _ = await cluster.generate(prompt)
                assert tokens == continuation(prompt, 8)
                answered[asker] += 1

        monkeypatch.setattr(
            "services.rank.intake._be_noticed", router_has_heard_and_what_it_sent_before_has_come
        )
        asking = [asyncio.create_task(keep_asking(asker)) for asker in range(3)]
        await leaving.drain()
        explained = await cluster.stubs[0].Explain(
            generation_pb2.ExplainRequest(request=ids_request([0] * 8))
        )
        excluded = {c.prefill.worker: c.excluded for c in explained.candidates}
        assert "draining" in excluded["prefill-0"] and not excluded["prefill-1"]
        await cluster.stop_rank("prefill-0/0")
        async with asyncio.timeout(10):
            while key in router.mirror.ranks:
                await asyncio.sleep(0.005)
        stopping.set()
        await asyncio.gather(*asking)
        assert await moves(cluster, "retry", "migration") == 0
        await cluster.assert_nothing_held()


async def test_what_runs_on_a_decode_rank_that_drains_ends_there_though_its_lease_is_lost(
    etcd_endpoint, model_dir, cluster_name
):
    """A key that goes while the rank drains looks as if the rank had left; but its stream speaks."""
    settings = dict(decode=(1,), fake_step_s=0.01)
    async with (
        FakeCluster(etcd_endpoint, model_dir, cluster_name, **settings) as cluster,
        client(etcd_endpoint) as etcd,
    ):
        router, leaving = cluster.routers[0], cluster.ranks["decode-0/0"]
        key, prompt = leaving.address.id.key, prompt_of(1)
        request = asyncio.create_task(cluster.generate(prompt, 300))
        forgotten = []
        async with asyncio.timeout(20):
            while not router.mirror.index.num_blocks(key):
                await asyncio.sleep(0.005)
            draining = asyncio.create_task(leaving.drain())
            while not router.mirror.ranks[key].draining:
                await asyncio.sleep(0.005)
            router.mirror.subscribe(lambda rank: forgotten.append(rank not in router.mirror.ranks))
            registered = await etcd.get(ClusterKeys(cluster_name).registration(key))
            await etcd.revoke_lease(registered.lease_id)
            while True not in forgotten:
                await asyncio.sleep(0.005)
        assert not request.done()
        tokens, _ = await request
        assert tokens == continuation(prompt, 300)
        assert await moves(cluster, "retry", "migration") == 0
        await draining
        await cluster.assert_nothing_held()
