import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from net.echo import NAMES, Service, call, serving, stub_of
from services.net import grpc_errors, servers
from services.values import errors
from services.wire.isthmus.v1 import (
    generation_pb2,
    generation_pb2_grpc,
)


async def test_deadlines(subtests):
    with subtests.test("remaining time is what the caller gave"):
        service = Service()
        async with serving(service) as (_, channel):
            await call(channel, timeout_s=60)
            assert 0 < service.left_s < 61  # gRPC rounds it up on the wire
            await call(channel, timeout_s=None)
            assert service.left_s is None
    for left_s, told_s in [(9e9, 365 * 86_400.0), (1e300, 365 * 86_400.0), (5.0, 5.0)]:
        with subtests.test("a deadline that is far away is a year", left_s=left_s, told_s=told_s):

            class Context:
                def time_remaining(self, left_s=left_s):
                    return left_s

            assert servers.remaining_s(Context()) == told_s
    with subtests.test("a passed deadline is an error"):

        class Context:
            def time_remaining(self):
                return 0.0

        with pytest.raises(errors.DeadlineExceeded):
            servers.remaining_s(Context())


async def health_of(channel):
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_health_reflection_and_a_taken_port(subtests):
    with subtests.test("health says what it was told"):
        async with serving(Service(), is_serving=False) as (server, channel):
            assert await health_of(channel) == "NOT_SERVING"
            await server.set_serving(True)
            assert await health_of(channel) == "SERVING"
            await server.begin_shutdown()
            await server.set_serving(True)
            assert await health_of(channel) == "NOT_SERVING"
    with subtests.test("reflection lists the services"):
        async with serving(Service()) as (_, channel):
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
            async for response in stream:
                names = {service.name for service in response.list_services_response.service}
        assert names >= {"isthmus.v1.Generation", "grpc.health.v1.Health"}
    with subtests.test("a taken port is refused"):
        async with serving(Service()) as (server, _):
            with pytest.raises(errors.ConfigError, match=str(server.port)):
                await servers.open_server(f"localhost:{server.port}", lambda _: None, NAMES)


async def test_stopping_drains_and_then_cancels_what_still_runs():
    service = Service()
    story = []

    async with serving(service) as (server, channel):

        async def drain():
            story.append(await health_of(channel))

        stopping = asyncio.Event()
        serve = asyncio.create_task(servers.serve_until_stopped(server, stopping, 0.05, drain))
        stream = stub_of(channel).Generate(generation_pb2.GenerateRequest())
        await asyncio.wait_for(service.running.wait(), 10)
        stopping.set()
        await asyncio.wait_for(serve, 10)
        assert story == ["NOT_SERVING"]
        assert service.stream_closed.is_set()
        with pytest.raises(errors.IsthmusError), grpc_errors.renaming():
            async for _ in stream:
                pass


async def test_a_stop_waits_no_longer_than_it_must(subtests, monkeypatch, caplog):
    with subtests.test("a stream that never ends does not use up the grace"), monkeypatch.context() as patch:
        patch.setattr(servers, "_LAST_WORDS_S", 0.05)
        service = Service()
        async with serving(service) as (server, channel):

            async def drained():
                """Nothing runs but the stream."""

            stopping = asyncio.Event()
            serve = asyncio.create_task(servers.serve_until_stopped(server, stopping, 1000.0, drained))
            stream = stub_of(channel).Generate(generation_pb2.GenerateRequest())
            await asyncio.wait_for(service.running.wait(), 10)
            stopping.set()
            await asyncio.wait_for(serve, 10)
            assert service.stream_closed.is_set()
            stream.cancel()
    with subtests.test("a drain that never ends does not hold the stop"):
        async with serving(Service()) as (server, _):
            stopping = asyncio.Event()
            stopping.set()
            await asyncio.wait_for(
                servers.serve_until_stopped(server, stopping, 0.01, asyncio.Event().wait), 10
            )
        assert "drain_timed_out" in caplog.text


@pytest.mark.long
async def test_calls_that_wait_for_the_event_loop_are_not_turned_away():
    """gRPC itself would cancel some past 1,000, and all past 3,000."""
    async with serving(Service()) as (server, _):
        with grpc.insecure_channel(f"localhost:{server.port}") as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            # The loop stands still while they are made, and threads of gRPC's send them meanwhile.
            calls = [stub.Abort.future(generation_pb2.AbortRequest(), timeout=60) for _ in range(4_000)]
            codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
        assert codes == {grpc.StatusCode.OK}
