"""Two models, and an alias of both, behind one router: each has ranks of its own."""

import asyncio
import json
from collections import Counter

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request, prompt_of
from services.router.models import side_key, sides
from services.wire.isthmus.v1 import generation_pb2

pytestmark = pytest.mark.long

WEIGHTS = {"fake": 80, "next": 20}


async def listed(cluster):
    answer = await cluster.stubs[0].ListModels(generation_pb2.ListModelsRequest())
    return {model.id: (model.prefill_ranks, model.decode_ranks) for model in answer.models}


async def until_listed(cluster, expected):
    async with asyncio.timeout(20):
        while await listed(cluster) != expected:
            await asyncio.sleep(0.02)


async def answered(cluster, number, **fields):
    """Return the header of a conversation's answer, and the worker that gave it."""
    request = ids_request(prompt_of(number), 1, conversation_id=f"c{number}", **fields)
    call = cluster.stubs[0].Generate(request, timeout=20)
    metadata = dict(await call.initial_metadata())
    responses = [response async for response in call]
    return metadata.get("x-isthmus-model"), responses[-1].finish.placement.decode.worker


async def test_two_models_and_a_canary(
    etcd_endpoint, model_dir, cluster_name, tmp_path, monkeypatch, subtests
):
    monkeypatch.setattr("services.router.models_file._FOLLOW_S", 0.02)
    path = tmp_path / "models.json"
    both = {"models": {"next": {"model": str(model_dir)}}, "aliases": {"both": WEIGHTS}}
    path.write_text(json.dumps(both))
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,))
    cluster.router_config = cluster.with_models(path)
    own = {
        f"c{n}": sides(WEIGHTS, side_key(ids_request([], conversation_id=f"c{n}", model="both")))[0]
        for n in range(40)
    }
    async with cluster:
        with subtests.test("a model is listed once it has ranks"):
            assert await listed(cluster) == {"fake": (1, 1), "both": (1, 1)}
            assert await answered(cluster, 0, model="both") == ("fake", "decode-0")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answered(cluster, 0, model="next")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with subtests.test("its ranks serve it alone"):
            await cluster.start_rank("prefill", "prefill-next", 0, model_name="next")
            await cluster.start_rank("decode", "decode-next", 0, model_name="next")
            await until_listed(cluster, {"fake": (1, 1), "next": (1, 1), "both": (2, 2)})
            assert await answered(cluster, 1, model="next") == (None, "decode-next")
            assert await answered(cluster, 1) == (None, "decode-0")
            ranks = (await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())).ranks
            assert Counter(rank.model for rank in ranks) == {"fake": 2, "next": 2}
        with subtests.test("a conversation has one side, by the weights"):
            for _ in range(2):
                answers = await asyncio.gather(*(answered(cluster, n, model="both") for n in range(40)))
                assert [model for model, _ in answers] == list(own.values())
                for model, worker in answers:
                    assert worker == {"fake": "decode-0", "next": "decode-next"}[model]
            assert 2 <= list(own.values()).count("next") <= 16
        with subtests.test("while one fleet is down the alias answers from the other"):
            await cluster.stop_rank("decode-next/0")
            await until_listed(cluster, {"fake": (1, 1), "next": (1, 0), "both": (2, 1)})
            answers = await asyncio.gather(*(answered(cluster, n, model="both") for n in range(40)))
            assert {*answers} == {("fake", "decode-0")}
        with subtests.test("a model leaves with the file"):
            path.write_text(json.dumps({}))
            await until_listed(cluster, {"fake": (1, 1)})
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answered(cluster, 1, model="both")
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            ranks = (await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())).ranks
            assert {rank.model for rank in ranks if "is not served" in rank.excluded} == {"next"}
        await cluster.assert_nothing_held()
