"""A certificate of the CA is not enough: a server may ask for a name in it."""

from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from net.certificates import make_another, make_certificates
from net.echo import Service, call, serving, stub_of
from services.net import channels
from services.net.channels import TlsConfig
from services.net.guard import carries
from services.router.http.bounded_connection import HttpTls
from services.values.errors import Forbidden, PeerFailed
from services.wire.isthmus.v1 import generation_pb2


def test_a_name_is_carried_whole_or_by_a_wildcard(subtests):
    for names, asked, is_let_in in [
        (["ranks.isthmus"], "ranks.isthmus", True),
        (["other", "Ranks.Isthmus"], "ranks.isthmus", True),
        (["*.isthmus"], "ranks.isthmus", True),
        (["*.isthmus"], "a.ranks.isthmus", False),
        (["*.isthmus"], "isthmus", False),
        (["*"], "isthmus", False),
        (["isthmus"], "ranks.isthmus", False),
        (["ranks.isthmus.evil"], "ranks.isthmus", False),
        ([], "ranks.isthmus", False),
        (["127.0.0.1"], "127.0.0.1", True),
    ]:
        with subtests.test(names=names, asked=asked, is_let_in=is_let_in):
            assert carries(names, asked) == is_let_in


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Certificates of one authority: a service's, a tenant's."""
    folder = tmp_path_factory.mktemp("pem")
    services = make_certificates(folder / "services", "DNS:ranks.isthmus,DNS:localhost")
    tenants = make_another(services, folder / "tenant", "DNS:tenant-a,DNS:localhost")
    return tls_of(services), tls_of(tenants)


def tls_of(folder):
    return TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem", mutual=True)


async def test_ranks_take_calls_of_services_alone(made, caplog):
    services, tenants = made
    asking, service = replace(services, peer_name="ranks.isthmus"), Service()
    async with serving(service, asking, services) as (server, channel):
        assert (await call(channel)).found
        async with channels.open_channel(f"localhost:{server.port}", tenants) as stranger:
            with pytest.raises(Forbidden, match=r"ranks\.isthmus"):
                await call(stranger)
            calls = (
                stub_of(stranger).Generate(generation_pb2.GenerateRequest(text="Hi")).read(),
                health_pb2_grpc.HealthStub(stranger).Check(health_pb2.HealthCheckRequest()),
            )
            for refused in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await refused
                assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not service.running.is_set()
        assert "peer_refused" in caplog.text and "tenant-a" in caplog.text
        service.release.set()
        stream = stub_of(channel).Generate(generation_pb2.GenerateRequest(text="Hi"))
        assert [response.text async for response in stream] == ["Hi"]


async def test_a_routers_clients_may_be_another_authoritys_and_its_servers_not(tmp_path, made):
    services, _ = made
    clients = make_certificates(tmp_path / "clients", "DNS:tenant-a,DNS:localhost")
    front = replace(services, client_ca=clients / "ca.pem")
    own = TlsConfig(services.ca, clients / "cert.pem", clients / "key.pem", mutual=True)
    async with serving(Service(), front, own) as (server, channel):
        assert (await call(channel)).found
        async with channels.open_channel(f"localhost:{server.port}", services) as ours:
            assert (await call(ours)).found
    async with serving(Service(), services, own) as (_, channel):  # a rank
        with pytest.raises(PeerFailed):
            await call(channel)
    strange_server = replace(tls_of(clients), client_ca=services.ca)
    async with serving(Service(), strange_server, front) as (_, channel):
        with pytest.raises(PeerFailed):
            await call(channel)
    authorities = HttpTls(front)._of_files().get_ca_certs()
    assert len(authorities) == 2 and set(front.certificates.validities) == {"cert", "ca", "client_ca"}
