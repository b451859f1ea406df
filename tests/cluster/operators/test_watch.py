"""A cluster watched while it serves: over gRPC and over HTTP, to the end."""

import asyncio
import json

import grpc
import httpx
import pytest
from google.protobuf import json_format

from cluster.harness import FakeCluster, prompt_of
from services.wire.isthmus.v1.generation_pb2 import WatchClusterRequest, WatchClusterResponse

DEADLINE_S = 20.0


async def until(responses, holds):
    """Responses up to the first of which it holds."""
    async with asyncio.timeout(DEADLINE_S):
        async for response in responses:
            if holds(response):
                return response
    raise AssertionError("the stream ended")


async def over_http(router):
    url = f"http://127.0.0.1:{router.http_port}/v1/cluster/watch?interval_s=0.1"
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http, http.stream("GET", url) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json_format.ParseDict(json.loads(line.removeprefix("data: ")), WatchClusterResponse())


async def test_a_second_turn_and_a_lost_rank_are_seen(etcd_endpoint, model_dir, cluster_name):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, fake_step_s=0.002) as cluster:
        (router,), (stub,) = cluster.routers, cluster.stubs
        call, events = stub.WatchCluster(WatchClusterRequest(interval_s=0.1)), over_http(router)
        for responses in (call, events):
            first = await until(responses, lambda response: True)
            assert {rank.state for rank in first.ranks} == {"live"} and len(first.ranks) == 3

        ids, conversation = prompt_of(1), {"conversation_id": "c", "request_id": "turn-1"}
        answer, _ = await cluster.generate(ids, **conversation)
        await cluster.generate(ids, tenant="another")
        ids = [*ids, *answer, 7]
        _, finish = await cluster.generate(ids, **conversation | {"request_id": "turn-2"})
        for responses in (call, events):
            told = []
            while len(told) < 2:
                told += (await until(responses, lambda response: response.finished)).finished
            assert [each.request_id for each in told] == ["turn-1", "turn-2"]
            assert {each.outcome for each in told} == {"ok"} and told[1].conversation_id == "c"
            assert told[1].finish.usage == finish.usage and finish.usage.decode_prefix_len > 0
            (chosen,) = [each for each in told[1].candidates if each.chosen]
            assert chosen.decode == finish.placement.decode and chosen.pinned

        running = asyncio.create_task(cluster.generate(prompt_of(2), max_tokens=400, request_id="long"))
        seen = await until(call, lambda response: response.running and response.running[0].completion_tokens)
        (one,) = seen.running
        assert (one.request_id, one.prompt_tokens, seen.num_running) == ("long", 21, 1)
        assert one.decode.worker == "decode-0" and one.prefill.worker == "prefill-0"
        await running

        lost = finish.placement.decode
        await cluster.stop_rank(f"{lost.worker}/{lost.rank}")
        for responses in (call, events):
            changed = await until(
                responses,
                lambda response: (
                    any(rank.rank == lost and rank.excluded for rank in response.ranks)
                    or lost in response.gone
                ),
            )
            assert changed
        call.cancel()
        await events.aclose()


async def test_what_is_wrong_is_told_at_once_and_watching_ends_with_the_router(
    etcd_endpoint, model_dir, cluster_name
):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        (router,), (stub,) = cluster.routers, cluster.stubs
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await until(stub.WatchCluster(WatchClusterRequest(interval_s=0.01)), bool)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "interval_s" in refused.value.details()
        call, events = stub.WatchCluster(WatchClusterRequest(interval_s=60)), over_http(router)
        for responses in (call, events):
            await until(responses, lambda response: True)
        router.watch.close()
        for responses in (call, events):
            async with asyncio.timeout(DEADLINE_S):
                assert len([response async for response in responses]) == 1  # the last words
        assert await call.code() is grpc.StatusCode.OK
