"""Decode ranks whose engine computes no prompts, as SGLang's: the router never chooses plan local."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request
from services.engine.paged.shell.decode_engine import PagedDecodeEngine
from services.values.rank import Plan
from services.wire.isthmus.v1 import common_pb2, generation_pb2


@pytest.fixture(autouse=True)
def computes_no_prompts(monkeypatch):
    monkeypatch.setattr(PagedDecodeEngine, "plans", frozenset({Plan.REMOTE}))


async def test_plan_local_is_not_considered_and_alone_refused(
    etcd_endpoint, model_dir, cluster_name, subtests
):
    with subtests.test("only plan remote is considered"):
        cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), plans=("remote", "local"))
        async with cluster:
            probe = generation_pb2.ExplainRequest(request=ids_request([1, 2, 3]))
            explanation = await cluster.stubs[0].Explain(probe)
            assert {candidate.plan for candidate in explanation.candidates} == {common_pb2.PLAN_REMOTE}
    with subtests.test("plan local alone is refused with a reason"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,)) as cluster:
            cluster.router_config = replace(cluster.router_config, plans=("local",))
            await cluster._start_router("router-local")
            stub = cluster.stubs[1]
            async with asyncio.timeout(10):
                while not (await stub.ListModels(generation_pb2.ListModelsRequest())).models:
                    await asyncio.sleep(0.02)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Explain(generation_pb2.ExplainRequest(request=ids_request([1, 2, 3])))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "compute no prompts" in error.value.details()
