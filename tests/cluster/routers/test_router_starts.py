"""These tests show when a router opens."""

import asyncio

from grpc.aio import insecure_channel
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.router import app
from services.router.router_config import RouterConfig


async def test_a_router_that_knows_no_rank_takes_nobodys_place(model_dir, monkeypatch, caplog):
    """It opens when etcd has told it of ranks, or to be closed."""
    monkeypatch.setattr(app, "_RANKS_LATE_S", 0.05)
    stopping, config = asyncio.Event(), RouterConfig(model=str(model_dir), etcd=("127.0.0.1:1",))

    async def serve():
        async with app.open_router(config, "ignorant", stopping) as router:
            stub = health_pb2_grpc.HealthStub(channel := insecure_channel(f"127.0.0.1:{router.server.port}"))
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            await channel.close()
            return answer.status

    serving = asyncio.create_task(serve())
    async with asyncio.timeout(20):
        while "router_waits_for_etcd" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not serving.done()
    stopping.set()
    async with asyncio.timeout(20):
        assert await serving == health_pb2.HealthCheckResponse.NOT_SERVING
