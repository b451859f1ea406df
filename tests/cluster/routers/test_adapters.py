"""Adapters are models of their own to clients, and their KV is nobody else's. Engine fake gives it away."""

import grpc
import pytest

from cluster.harness import FakeCluster, prompt_of
from services.engine.fake import continuation
from services.model.lora import CONFIG, WEIGHTS
from services.wire.isthmus.v1 import generation_pb2

PROMPT = prompt_of(1, 40)


def adapter_files(directory, weights=b"weights"):
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text("{}")
    (directory / WEIGHTS).write_bytes(weights)
    return directory


def adapters_of(cluster):
    return {
        adapter.name: adapter for rank in cluster.ranks.values() for adapter in rank.engine.adapters.loaded
    }


async def models(cluster):
    answer = await cluster.stubs[0].ListModels(generation_pb2.ListModelsRequest())
    return {model.id: (model.prefill_ranks, model.decode_ranks, model.base) for model in answer.models}


async def test_each_adapter_is_a_model_with_kv_of_its_own(etcd_endpoint, model_dir, cluster_name, tmp_path):
    a, b = (adapter_files(tmp_path / name, name.encode()) for name in "ab")
    lora = (f"a={a}", f"b={b}")
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, lora=lora, decode=(1,)) as cluster:
        known = adapters_of(cluster) | {"": None}
        assert await models(cluster) == {
            "fake": (1, 1, ""), "fake:a": (1, 1, "fake"), "fake:b": (1, 1, "fake")
        }  # fmt: skip
        (decode,) = (rank.address.id for name, rank in cluster.ranks.items() if name.startswith("decode"))
        for turn in range(2):
            for name, adapter in known.items():
                model = f"fake:{name}" if name else ""
                tokens, finish = await cluster.generate(PROMPT, model=model)
                assert tokens == continuation(PROMPT, 8, adapter=adapter)
                assert bool(finish.usage.decode_prefix_len) == bool(turn)
                await cluster.until_indexed(decode, PROMPT, model=model)
        for model in ("fake:c", "fake:", "other:a"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.generate(PROMPT, model=model)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await cluster.assert_nothing_held()
