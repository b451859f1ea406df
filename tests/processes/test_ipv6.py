"""A cluster that listens on :: and whose ranks are known by an address of IPv6."""

import asyncio
import contextlib

import httpx
import pytest

from cluster.harness import ids_request
from net.ipv6 import LOOPBACKS, needs_ipv6
from processes.harness import LONG_S, ProcessCluster
from services.engine.fake import continuation
from services.host.ports import free_ports
from services.net import channels
from services.wire.isthmus.v1 import generation_pb2_grpc


@needs_ipv6
@pytest.mark.long
async def test_a_cluster_on_every_address_is_reached_by_both_families(tmp_path, model_dir):
    (health_port,) = free_ports("::", 1)
    async with ProcessCluster(
        tmp_path,
        model_dir,
        decode_dp_size=1,
        host="::",
        rank_flags=("--advertise-host=::1",),
        router_flags=(f"--health-port={health_port}",),
    ) as cluster:
        endpoints = [line.fields["endpoint"] for line in cluster.events("rank_ready")]
        assert len(endpoints) == 2 and all(endpoint.startswith("[::1]:") for endpoint in endpoints)
        (ready,) = cluster.events("router_ready")
        ports = {"/v1/models": cluster.local.http_ports[0], "/metrics": ready.fields["metrics_port"]}
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=LONG_S))
            for host in LOOPBACKS:
                for path, port in {**ports, "/ready": health_port}.items():
                    assert (await http.get(f"http://{host}:{port}{path}")).status_code == 200, (host, path)
                endpoint = f"{host}:{cluster.local.router_ports[0]}"
                channel = await stack.enter_async_context(channels.open_channel(endpoint))
                call = generation_pb2_grpc.GenerationStub(channel).Generate(ids_request([1, 2, 3]))
                async with asyncio.timeout(LONG_S):
                    assert [token async for r in call for token in r.token_ids] == continuation([1, 2, 3], 8)
