"""The whole way under TLS, and whoever speaks otherwise is refused at every port."""

import asyncio
import ssl
from dataclasses import replace

import grpc
import httpx
import pytest

from cluster.harness import FakeCluster
from net.certificates import Mounted, make_another, make_certificates
from services.cli import generate
from services.cli.look import explain
from services.engine.fake import continuation
from services.net import channels
from services.net.channels import TlsConfig
from services.values import errors
from services.wire.isthmus.v1 import (
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    handshake_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

PROMPT = [(7 * i) % 500 for i in range(21)]
NAME = "ranks.isthmus.internal"


@pytest.fixture(scope="module")
def by_address(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("by-address"), "IP:127.0.0.1")


@pytest.fixture(scope="module")
def by_name(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("by-name"), f"DNS:{NAME}")


def settings_of(folder, **more):
    return {
        "tls_ca": folder / "ca.pem",
        "tls_cert": folder / "cert.pem",
        "tls_key": folder / "key.pem",
        **more,
    }


async def check_two_turns(cluster):
    first, _ = await cluster.generate(PROMPT, conversation_id="c")
    assert first == continuation(PROMPT, 8)
    second_prompt = [*PROMPT, *first, 3, 4]
    second, finish = await cluster.generate(second_prompt, conversation_id="c")
    assert second == continuation(second_prompt, 8)
    assert finish.usage.decode_prefix_len >= len(PROMPT) // 4 * 4
    assert finish.usage.kv_bytes_moved > 0  # over the handshake that the two ranks had under TLS
    await cluster.assert_nothing_held()


def calls_of(cluster):
    """One call to each service, as functions of a channel."""
    decode, prefill = cluster.ranks["decode-0/0"], cluster.ranks["prefill-0/0"]
    router = f"127.0.0.1:{cluster.routers[0].server.port}"
    return [
        (
            router,
            lambda c: generation_pb2_grpc.GenerationStub(c).ListModels(generation_pb2.ListModelsRequest()),
        ),
        (decode.address.endpoint, lambda c: decode_pb2_grpc.DecodeStub(c).Attach().read()),
        (prefill.address.endpoint, lambda c: handshake_pb2_grpc.HandshakeStub(c).Connect().read()),
        (
            prefill.address.endpoint,
            lambda c: prefill_pb2_grpc.PrefillStub(c).Prefill(prefill_pb2.PrefillRequest()),
        ),
    ]


async def check_refused(cluster, tls):
    for endpoint, call in calls_of(cluster):
        async with channels.open_channel(endpoint, tls) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call(channel)
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE, (endpoint, failure.value)


def https(cluster, folder, *, with_certificate=False):
    trust = ssl.create_default_context(cafile=folder / "ca.pem")
    if with_certificate:
        trust.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{cluster.routers[0].http_port}", verify=trust)


async def check_completion(client):
    async with client:
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["token_ids"] == continuation(PROMPT, 8)


async def check_commands(cluster, folder):
    """`isthmus generate` and `isthmus explain` take the same files."""
    router = f"127.0.0.1:{cluster.routers[0].server.port}"
    pem = [f"--tls-ca={folder / 'ca.pem'}", f"--tls-cert={folder / 'cert.pem'}"]
    flags = [f"--router={router}", *pem, f"--tls-key={folder / 'key.pem'}", "--prompt=hello"]
    # In a thread, for a command runs a loop of its own.
    assert await asyncio.to_thread(explain.run, flags) == 0
    assert await asyncio.to_thread(generate.run, [*flags, "--max-tokens=3"]) == 0
    with pytest.raises(errors.ConfigError, match="--tls-ca"):
        await asyncio.to_thread(generate.run, [*flags[:1], *flags[2:]])
    with pytest.raises(errors.PeerFailed, match=r"hangs up .*: does it want TLS"):
        await asyncio.to_thread(generate.run, [flags[0], flags[-1]])


async def test_certificates_by_address_and_by_name(
    etcd_endpoint, model_dir, cluster_name, by_address, by_name, subtests
):
    with subtests.test("every hop is under tls"):
        tls = settings_of(by_address)
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, tls=tls) as cluster:
            await check_two_turns(cluster)
            await check_refused(cluster, None)
            await check_completion(https(cluster, by_address))
            async with httpx.AsyncClient() as plain:
                with pytest.raises(httpx.TransportError):
                    await plain.get(f"http://127.0.0.1:{cluster.routers[0].http_port}/v1/models")
            await cluster.assert_nothing_held()
    with subtests.test("certificates with one name for all"):
        # As for pods, whose addresses no certificate can foresee.
        tls = settings_of(by_name, tls_mutual=True, tls_server_name=NAME)
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", tls=tls) as cluster:
            await check_two_turns(cluster)


async def test_mutual_tls_asks_every_client_for_its_certificate(
    etcd_endpoint, model_dir, cluster_name, by_address, by_name
):
    tls = settings_of(by_address, tls_mutual=True)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, tls=tls) as cluster:
        await check_two_turns(cluster)
        await check_refused(cluster, None)
        await check_refused(cluster, TlsConfig(ca=by_address / "ca.pem"))
        # With a certificate of an authority that is not the cluster's.
        own = TlsConfig(by_address / "ca.pem", by_name / "cert.pem", by_name / "key.pem", mutual=True)
        await check_refused(cluster, own)
        await check_commands(cluster, by_address)
        await check_completion(https(cluster, by_address, with_certificate=True))
        async with https(cluster, by_address) as anonymous:
            with pytest.raises(httpx.TransportError):
                await anonymous.get("/v1/models")
        await cluster.assert_nothing_held()


@pytest.fixture
def renewed(tmp_path):
    """Of another authority."""
    return make_certificates(tmp_path / "renewed", "IP:127.0.0.1")


async def refused_over_https(cluster, folder):
    async with https(cluster, folder, with_certificate=True) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/v1/models")


@pytest.mark.long
async def test_certificates_end_and_are_renewed_while_a_stream_runs(
    etcd_endpoint, model_dir, cluster_name, by_address, renewed, tmp_path
):
    """Nobody is restarted, no token is lost, and what connects anew does so under the new authority."""
    ended = make_another(by_address, tmp_path / "ended", "IP:127.0.0.1", days=-1)
    mounted = Mounted(tmp_path / "mounted", by_address)
    tls = settings_of(mounted.folder, tls_mutual=True)
    options = dict(tls=tls, prefill=(1, 1), fake_step_s=0.02)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **options) as cluster:
        running = asyncio.create_task(cluster.generate(PROMPT, max_tokens=150, conversation_id="c"))
        mounted.swap(ended)
        await refused_over_https(cluster, by_address)
        assert "ended at" in cluster.router_config.tls_health().ready
        mounted.swap(renewed)
        assert cluster.router_config.tls_health().ready == ""
        await check_completion(https(cluster, renewed, with_certificate=True))
        await refused_over_https(cluster, by_address)
        assert not running.done()
        tokens, finish = await running
        assert tokens == continuation(PROMPT, 150) and finish.usage.completion_tokens == 150
        # A rank's other life: router, decode and prefill ranks connect to it anew.
        for role, worker, index in (("decode", "decode-0", 1), ("prefill", "prefill-1", 0)):
            gone = await cluster.stop_rank(f"{worker}/{index}")
            await cluster.start_rank(role, worker, index, int(gone.address.endpoint.rpartition(":")[2]))
        await cluster.until_placeable()
        for number in range(6):
            prompt = [number, *PROMPT]
            assert (await cluster.generate(prompt))[0] == continuation(prompt, 8)
        await check_refused(cluster, replace(cluster.base.tls(), ca=by_address / "ca.pem"))
        await cluster.assert_nothing_held()
