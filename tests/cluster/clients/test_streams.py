"""A client's stream: bad input, deadlines, aborts, who leaves, and what all of them leave behind."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request, prompt_of
from services.engine.fake import continuation
from services.router.text.prompt import PromptEncoder
from services.wire.isthmus.v1 import common_pb2, generation_pb2


async def test_a_client_that_leaves_frees_everything(etcd_endpoint, model_dir, cluster_name, subtests):
    for number, after_s in enumerate([0.0, 0.1, 0.3]):
        with subtests.test(after_s=after_s):
            async with FakeCluster(
                etcd_endpoint, model_dir, f"{cluster_name}-{number}", fake_step_s=0.05
            ) as cluster:
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


async def test_far_deadlines_are_not_taken_for_past_ones(etcd_endpoint, model_dir, cluster_name, subtests):
    """As they come over HTTP; None: the router's own limit, as far away."""
    for number, timeout_s in enumerate([8e9, 1e300, None]):
        with subtests.test(timeout_s=timeout_s):
            cluster = FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-{number}", decode=(1,))
            cluster.router_config = replace(cluster.router_config, request_timeout_s=9e9)
            async with cluster:
                tokens = []
                async for response in cluster.routers[0].generator.generate(
                    ids_request(prompt_of(1)), timeout_s
                ):
                    tokens.extend(response.token_ids)
                assert tokens == continuation(prompt_of(1), 8)
                assert cluster.routers[0].generator.time_limit_s(timeout_s) < 4e7
                await cluster.assert_nothing_held()


async def test_aborts_and_deadlines_reach_the_ranks(etcd_endpoint, model_dir, cluster_name, subtests):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_step_s=0.02) as cluster:
        with subtests.test("deadlines reach the ranks"):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await cluster.generate(prompt_of(1, 120), 400, timeout=0.5)
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await cluster.assert_nothing_held()
        with subtests.test("abort ends a stream with its reason"):
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
    "2 MB of text": (generation_pb2.GenerateRequest(text="a" * 2_000_000), "INVALID_ARGUMENT", "text"),
    "10 MB of text": (  # more than any message may have here: gRPC refuses it unread
        generation_pb2.GenerateRequest(text="a" * 10_000_000),
        "RESOURCE_EXHAUSTED",
        "larger than max",
    ),
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


async def test_an_abort_before_the_first_rank_ends_the_stream_with_its_reason(
    etcd_endpoint, model_dir, cluster_name, monkeypatch
):
    encoding, go_on = asyncio.Event(), asyncio.Event()
    encode = PromptEncoder.encode

    async def slow(self, *arguments):
        encoding.set()
        await go_on.wait()
        return await encode(self, *arguments)

    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,)) as cluster:
        monkeypatch.setattr(PromptEncoder, "encode", slow)
        running = asyncio.create_task(cluster.generate(prompt_of(1), request_id="mine"))
        await encoding.wait()
        assert (await cluster.stubs[0].Abort(generation_pb2.AbortRequest(request_id="mine"))).found
        go_on.set()
        tokens, finish = await running
        assert (tokens, finish.reason) == ([], common_pb2.FINISH_REASON_ABORTED)
