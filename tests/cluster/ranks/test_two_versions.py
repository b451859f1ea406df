"""A rolling upgrade that changes the handshake: for a while ranks of two versions are in one cluster."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from cluster.harness import FAKE_RANK, FakeCluster, ids_request, prompt_of
from cluster.metrics_page import moves
from services.engine import fake
from services.engine.fake import continuation
from services.index import joining
from services.wire.isthmus.v1 import generation_pb2, index_pb2

NEW_PAGES = FAKE_RANK.kv_pages + 1  # in the pools of the ranks that are upgraded
APART = "its KV layout differs from that of most ranks in handshake_version"


class Runner(fake.FakeRunner):
    def __init__(self, *, num_pages, **rest):
        super().__init__(num_pages=num_pages, **rest)
        self.layout = replace(self.layout, handshake_version=2 if num_pages == NEW_PAGES else 1)


@pytest.fixture
def two_versions(monkeypatch):
    """Workers 1 are upgraded; workers 0 are from before a registration said its version."""
    encode = joining.encode_registration

    def encoded(registration):
        pb = index_pb2.Registration.FromString(encode(registration))
        if pb.handshake_version == 1:
            pb.ClearField("handshake_version")
        return pb.SerializeToString()

    monkeypatch.setattr(fake, "FakeRunner", Runner)
    monkeypatch.setattr(joining, "encode_registration", encoded)
    pools = {worker: NEW_PAGES for worker in ("decode-1", "prefill-1")}
    return {"decode": (1, 1), "prefill": (1, 1), "pools": pools}


async def explained(cluster):
    return await cluster.stubs[0].Explain(generation_pb2.ExplainRequest(request=ids_request(prompt_of(0))))


async def drained(cluster, name):
    await cluster.ranks[name].intake.drain()
    await until_excluded(cluster, name, "draining")


async def undrained(cluster, name):
    await cluster.ranks[name].intake.undrain()
    await until_excluded(cluster, name, "")


async def until_excluded(cluster, name, reason):
    """The router knows."""
    async with asyncio.timeout(20):
        while True:
            ranks = (await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())).ranks
            if {f"{r.rank.worker}/{r.rank.rank}": r.excluded for r in ranks}[name] == reason:
                return
            await asyncio.sleep(0.01)


async def served(cluster, numbers):
    """Which workers served them."""

    async def one(prompt):
        tokens, finish = await cluster.generate(prompt)
        assert tokens == continuation(prompt, 8)
        return {finish.placement.decode.worker, finish.placement.prefill.worker}

    return set().union(*await asyncio.gather(*(one(prompt_of(number)) for number in numbers)))


@pytest.mark.long
async def test_the_old_ranks_serve_until_the_new_ones_can(
    etcd_endpoint, model_dir, cluster_name, two_versions
):
    old, new = {"decode-0", "prefill-0"}, {"decode-1", "prefill-1"}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **two_versions) as cluster:
        assert await served(cluster, range(12)) == old
        (left_out,) = [c for c in (await explained(cluster)).candidates if c.decode.worker == "decode-1"]
        assert left_out.excluded == APART

        await drained(cluster, "decode-0/0")
        assert await served(cluster, range(20, 26)) == new

        await drained(cluster, "prefill-1/0")
        reason = f"1 draining, 1 {APART}"
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as error:
            await served(cluster, [30])
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE

        await undrained(cluster, "decode-0/0")
        assert await served(cluster, range(40, 46)) == old
        assert await moves(cluster, "retry", "migration") == 0
        await cluster.assert_nothing_held()
