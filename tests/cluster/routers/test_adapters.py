"""Adapters are models of their own to clients, and their KV is nobody else's. Engine fake gives it away."""

import asyncio
import json

import grpc
import pytest

from cluster.harness import FakeCluster, prompt_of
from services.cli import lora as lora_command
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
    cluster = FakeCluster(etcd_endpoint, model_dir, cluster_name, lora=lora, decode=(1,))
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"aliases": {"canary": {"fake": 1, "fake:a": 1, "fake:none": 9}}}))
    cluster.router_config = cluster.with_models(path)
    async with cluster:
        known = adapters_of(cluster) | {"": None}
        assert await models(cluster) == {
            "fake": (1, 1, ""), "fake:a": (1, 1, "fake"), "fake:b": (1, 1, "fake"), "canary": (1, 1, "")
        }  # fmt: skip
        taken = set()
        for number in range(12):
            tokens, _ = await cluster.generate(PROMPT, model="canary", conversation_id=f"{number}")
            taken |= {name for name, each in known.items() if tokens == continuation(PROMPT, 8, adapter=each)}
        assert taken == {"", "a"}, "an alias has sides of its own, and asks no ranks for what they lack"
        (decode,) = (rank.address.id for name, rank in cluster.ranks.items() if name.startswith("decode"))
        for turn in range(2):
            for name, adapter in known.items():
                model = f"fake:{name}" if name else ""
                tokens, finish = await cluster.generate(PROMPT, model=model)
                assert tokens == continuation(PROMPT, 8, adapter=adapter)
                assert bool(finish.usage.decode_prefix_len) == (bool(turn) or name != "b")
                await cluster.until_indexed(decode, PROMPT, model=model)
        for model in ("fake:c", "fake:", "other:a"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.generate(PROMPT, model=model)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await cluster.assert_nothing_held()


async def lora(cluster, *words, ranks=()):
    router = f"127.0.0.1:{cluster.routers[0].server.port}"
    return await lora_command._run(lora_command.LoraConfig(words=words, ranks=ranks, router=router))


async def until(cluster, expected):
    async with asyncio.timeout(10):
        while await models(cluster) != {"fake": (1, 2, "")} | expected:
            await asyncio.sleep(0.01)


async def test_operators_load_and_unload_while_ranks_serve(
    etcd_endpoint, model_dir, cluster_name, tmp_path, capsys
):
    adapter_files(tmp_path / "own" / "a", b"1")
    adapter_files(tmp_path / "own" / "other", b"2")
    adapter_files(tmp_path / "elsewhere", b"3")
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, lora_dir=tmp_path / "own", decode=(1, 1)
    ) as cluster:
        # Whoever has no adapter is not asked, and the name alone does not make it the same.
        assert await lora(cluster, "load", "a", "a", ranks=("prefill-0", "decode-1")) == 0
        assert await lora(cluster, "load", "a", "other", ranks=("decode-0",)) == 0
        await until(cluster, {"fake:a": (1, 1, "fake")})
        a = cluster.ranks["decode-1/0"].engine.adapters.loaded[0]
        for _ in range(4):
            tokens, finish = await cluster.generate(PROMPT, model="fake:a")
            assert tokens == continuation(PROMPT, 8, adapter=a)
            assert finish.placements[-1].decode.worker == "decode-1"
        for name, directory, says in (
            ("a", "other", "with other weights"),
            ("b", "../elsewhere", "not below"),
            ("b", "none", "No such file"),
            ("b/c", "a", "not an adapter"),
        ):
            assert await lora(cluster, "load", name, directory, ranks=("decode-1",)) == 1
            assert says in capsys.readouterr().err
        assert await lora(cluster, "load", "a", "a", ranks=("decode-1",)) == 0  # again is no error
        assert await lora(cluster, "ls") == 0
        assert capsys.readouterr().out.count(a.digest) == 3
        running = asyncio.create_task(cluster.generate(PROMPT, 300, model="fake:a"))
        await asyncio.sleep(0.05)
        assert await lora(cluster, "unload", "a") == 0
        assert (await running)[0] == continuation(PROMPT, 300, adapter=a)
        await until(cluster, {})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(PROMPT, model="fake:a")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert await lora(cluster, "unload", "a", ranks=("decode-1",)) == 1
        await cluster.assert_nothing_held()
