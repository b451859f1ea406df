"""A router does not keep the memory of messages that it refuses."""

import asyncio
import json
import os
import sys

import grpc
import pytest

from bench.soak.ranks import resident_bytes
from cluster.harness import ids_request
from processes.harness import COMMON_FLAGS, RANK_FLAGS
from services.cli.local.local_cluster import LocalCluster, Shape
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

KEY = "crowds-key"
MESSAGES, MESSAGE_BYTES = 20, 60_000_000
OPTIONS = (("grpc.max_send_message_length", 2 * MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1))


def metadata(key):
    return (("authorization", f"Bearer {key}"),)


async def send(endpoint, key):
    """Return the statuses of all messages."""
    message = generation_pb2.GenerateRequest(text="a" * MESSAGE_BYTES).SerializeToString()

    async def one():
        async with grpc.aio.insecure_channel(endpoint, options=OPTIONS) as channel:
            call = channel.unary_stream("/isthmus.v1.Generation/Generate")(message, metadata=metadata(key))
            return (await call.code()).name

    return sorted(set(await asyncio.gather(*(one() for _ in range(MESSAGES)))))


@pytest.mark.long
async def test_a_router_does_not_keep_messages_that_it_refuses(tmp_path, model_dir):
    """20 of 60 MB at once, with a wrong key and then with a good one: one that is kept is 57 MiB."""
    (keys := tmp_path / "keys").write_text(f"{KEY} tenant=crowd\n")
    shape = Shape(
        model=model_dir,
        data_dir=tmp_path / "data",
        common_flags=COMMON_FLAGS,
        rank_flags=RANK_FLAGS,
        router_flags=(f"--api-key-file={keys}",),
    )
    async with LocalCluster(shape, lambda name, line: None) as cluster:
        stub = generation_pb2_grpc.GenerationStub(cluster.open_channel())
        async for _ in stub.Generate(ids_request(range(3, 15), 2), metadata=metadata(KEY), timeout=60):
            pass
        pid = cluster.children["router"].process.pid
        for key, answer in (("wrong", "UNAUTHENTICATED"), (KEY, "RESOURCE_EXHAUSTED")):
            before = resident_bytes(pid)
            load = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, cluster.router_endpoint(), key),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            told, _ = await load.communicate()
            assert json.loads(told) == [answer]
            assert resident_bytes(pid) - before <= 64 << 20


if __name__ == "__main__":
    print(json.dumps(asyncio.run(send(*sys.argv[1:]))))
