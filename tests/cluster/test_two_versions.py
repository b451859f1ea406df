"""A rolling upgrade that changes the handshake: for a while ranks of two versions serve one cluster."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request
from services.engine.fake import continuation
from services.rank import main as rank
from services.transfer import hello
from services.transfer.decode import links
from services.transfer.prefill import handshake_server
from services.values.errors import ProtocolError
from services.wire.isthmus.v1 import generation_pb2


def version_of(worker):
    return 2 if worker.endswith("-1") else 1


@pytest.fixture
def refused(monkeypatch):
    """Of two versions, by worker: each refuses the other at Hello. Every refusal is noted."""
    refusals, make, check_hello = [], rank._registration, hello.check_hello

    def registration(config, role, address):
        return replace(make(config, role, address), handshake_version=version_of(config.worker))

    def check(own, peer):
        if version_of(own.rank.worker) != version_of(peer.rank.worker):
            refusals.append((own.rank.worker, peer.rank.worker))
            raise ProtocolError("the peer speaks another version of the handshake")
        check_hello(own, peer)

    monkeypatch.setattr(rank, "_registration", registration)
    for module in (handshake_server, links):
        monkeypatch.setattr(module, "check_hello", check)
    return refusals


def prompt_of(number, length=21):
    return [(number * 37 + i * 5) % 500 for i in range(length)]


async def explained(cluster):
    return await cluster.stubs[0].Explain(generation_pb2.ExplainRequest(request=ids_request(prompt_of(0))))


async def drained(cluster, name):
    await cluster.ranks[name].intake.drain()
    await until_excluded(cluster, name, "draining")


async def until_excluded(cluster, name, reason):
    """The router knows."""
    async with asyncio.timeout(20):
        while True:
            ranks = (await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())).ranks
            if {f"{r.rank.worker}/{r.rank.rank}": r.excluded for r in ranks}[name] == reason:
                return
            await asyncio.sleep(0.01)


async def served(cluster, prompt):
    """Which version served it."""
    tokens, finish = await cluster.generate(prompt)
    assert tokens == continuation(prompt, 8)
    versions = {version_of(r.worker) for r in (finish.placement.decode, finish.placement.prefill)}
    (version,) = versions
    return version


async def test_requests_go_to_pairs_that_speak_the_same_version(
    etcd_endpoint, model_dir, cluster_name, refused
):
    shape = dict(decode=(1, 1), prefill=(1, 1))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        versions = await asyncio.gather(*(served(cluster, prompt_of(number)) for number in range(24)))
        assert set(versions) == {1, 2}

        await drained(cluster, "prefill-1/0")
        assert {await served(cluster, prompt_of(number)) for number in range(30, 36)} == {1}
        (left_out,) = [c for c in (await explained(cluster)).candidates if c.decode.worker == "decode-1"]
        assert left_out.excluded == "no prefill rank speaks its handshake version 2"

        await drained(cluster, "decode-0/0")
        reason = "1 draining, 1 no prefill rank speaks its handshake version 2"
        assert reason in (await explained(cluster)).reason
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as error:
            await served(cluster, prompt_of(40))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE

        await cluster.ranks["prefill-1/0"].intake.undrain()
        await until_excluded(cluster, "prefill-1/0", "")
        await drained(cluster, "prefill-0/0")
        assert await served(cluster, prompt_of(41)) == 2
        moves = cluster.routers[0].generator._metrics._moves
        assert moves.labels("retry")._value.get() == moves.labels("migration")._value.get() == 0
        assert refused == []
        await cluster.assert_nothing_held()
