"""The door of gRPC that asks for a key, and watches that end with theirs."""

import asyncio
import os
import re
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.http.backend import FakeBackend, app_of, client, models_of
from router.keys.tenants import TENANT_CALLS, bearer
from services.net import channels, grpc_errors, servers
from services.net.bytes_in_flight import BytesInFlight
from services.router import callers
from services.router.api_keys import ApiKeys, GrpcDoor
from services.router.generation_service import GENERATE, GenerationService, add_to_server, generate_handler
from services.router.watch_cluster import Watch
from services.values.errors import Forbidden, Unauthenticated
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc


class Player:
    def time_limit_s(self, timeout_s):
        return 60.0

    async def generate(self, request, timeout_s, traceparent, **_):
        yield generation_pb2.GenerateResponse(text=f"Hi {request.tenant}")

    async def tokenize(self, request):
        return generation_pb2.TokenizeResponse(token_ids=[len(request.tenant)], max_context_tokens=9)

    def list_models(self):
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(id="m")])

    def abort(self, request_id, tenant):
        return tenant in (None, "acme")

    def rejected(self, error):
        self.rejections.append(type(error).__name__)

    def __init__(self):
        self.rejections = []


async def told_of(asked):
    """A watch that says whose requests it shows."""
    yield generation_pb2.WatchClusterResponse(degraded=repr(asked.tenant))


async def told_for_ever(asked):
    while True:
        yield generation_pb2.WatchClusterResponse(degraded=repr(asked.tenant))
        await asyncio.sleep(0.01)


class ToldWatch(Watch):
    def __init__(self, told):
        self.responses = told


def service_of(player, told):
    return GenerationService(models_of(player), ToldWatch(told))


@asynccontextmanager
async def serving(keys, player, told=told_of, bounds=None):
    service = service_of(player, told)
    server = await servers.open_server(
        "127.0.0.1:0",
        partial(add_to_server, service),
        [],
        interceptors=[GrpcDoor(keys)],
        busy={GENERATE: generate_handler(service)},
        bounds=bounds or servers.ClientBounds(),
    )
    async with channels.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop()


@pytest.fixture
async def channel(keys):
    async with serving(keys, Player()) as channel:
        yield channel


async def list_models(channel, metadata):
    stub = generation_pb2_grpc.GenerationStub(channel)
    return await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=20, metadata=metadata)


async def generate(channel, metadata):
    stub = generation_pb2_grpc.GenerationStub(channel)
    return [
        r.text async for r in stub.Generate(generation_pb2.GenerateRequest(), timeout=20, metadata=metadata)
    ]


async def test_calls_of_every_kind_ask_for_a_key(channel, subtests, counted, caplog):
    for call in (list_models, generate):
        with subtests.test(call=call.__name__):
            counted.clear()
            assert await call(channel, (("authorization", "Bearer first-key"),))
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(channel, metadata)
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert isinstance(grpc_errors.error_from(refusal.value), Unauthenticated)
            assert counted == [("grpc", "no_key"), ("grpc", "wrong_key")]
    assert re.search(r"unauthenticated front=grpc peer=ipv4:127\.0\.0\.1:\d+ reason=no_key", caplog.text)


async def test_reflection_asks_for_a_key_and_health_does_not(channel):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for key, is_told in (("first-key", True), ("wrong", False)):
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request]), metadata=(("authorization", f"Bearer {key}"),)
        )
        if is_told:
            assert [response.HasField("list_services_response") async for response in stream] == [True]
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stream.read()
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_shows_no_key_is_refused_before_a_message_is_read(channel):
    """None is sent here: who asked for it would wait."""
    for method in ("Generate", "Abort", "WatchCluster"):
        call = channel.stream_stream(f"/isthmus.v1.Generation/{method}")(timeout=10)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_over_grpc_a_key_says_whose_a_request_is(subtests, of_tenants):
    for key, named, tenant in TENANT_CALLS:
        with subtests.test(key=key):
            request = generation_pb2.GenerateRequest(tenant=named)
            metadata, player = tuple(bearer(key).items()), Player()
            async with serving(of_tenants, player) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                generating = stub.Generate(request, timeout=20, metadata=metadata)
                tokenize = generation_pb2.TokenizeRequest(request=request)
                watching = stub.WatchCluster(
                    generation_pb2.WatchClusterRequest(tenant=named), timeout=20, metadata=metadata
                )
                if tenant is None:
                    for call in (
                        generating.read(),
                        stub.Tokenize(tokenize, metadata=metadata),
                        watching.read(),
                    ):
                        with pytest.raises(grpc.aio.AioRpcError) as refusal:
                            await call
                        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
                        assert isinstance(grpc_errors.error_from(refusal.value), Forbidden)
                    assert player.rejections == ["Forbidden"]
                else:
                    assert [response.text async for response in generating] == [f"Hi {tenant}"]
                    assert list((await stub.Tokenize(tokenize, metadata=metadata)).token_ids) == [len(tenant)]
                    assert [response.degraded async for response in watching] == [repr(tenant)]
    for key, sees_all in [("bare", False), ("acme", False), ("ours", True)]:
        with subtests.test(key=key):
            async with serving(of_tenants, Player()) as channel:
                watching = generation_pb2_grpc.GenerationStub(channel).WatchCluster(
                    generation_pb2.WatchClusterRequest(all_tenants=True),
                    timeout=20,
                    metadata=tuple(bearer(key).items()),
                )
                if sees_all:
                    assert [response.degraded async for response in watching] == ["None"]
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as refusal:
                        await watching.read()
                    assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with subtests.test("a key with a tenant aborts its own alone"):
        async with serving(of_tenants, Player()) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.AbortRequest(request_id="r")
            for key, found in (("acme", True), ("b", False), ("bare", True)):
                answer = await stub.Abort(request, timeout=20, metadata=tuple(bearer(key).items()))
                assert answer.found is found


async def test_a_watch_ends_with_its_key(file, subtests):
    for name, left in (
        ("an operator's key is taken out", "bare-key\n"),
        ("it is no operator's any more", "bare-key\nours-key\n"),
    ):
        with subtests.test(name):
            file.write_text("bare-key\nours-key operator\n")
            await watch_until_its_key_goes(file, left)


async def watch_until_its_key_goes(file, left):
    of_tenants, metadata = ApiKeys(file), tuple(bearer("ours").items())
    async with serving(of_tenants, Player(), told_for_ever) as channel:
        request = generation_pb2.WatchClusterRequest(all_tenants=True)
        stub = generation_pb2_grpc.GenerationStub(channel)
        watching = stub.WatchCluster(request, timeout=20, metadata=metadata)
        for _ in range(3):
            assert (await watching.read()).degraded == "None"
        (new := file.with_name("new")).write_text(left)
        os.replace(new, file)
        async with asyncio.timeout(20):
            while (response := await watching.read()) is not grpc.aio.EOF:
                assert response.degraded == "None"
        assert await watching.code() is grpc.StatusCode.OK


async def test_a_key_that_goes_before_the_first_response_is_refused(of_tenants, file):
    async def told_late(asked):
        file.write_text("bare-key\n")
        yield generation_pb2.WatchClusterResponse()

    async with client(FakeBackend(), ToldWatch(told_late), keys=of_tenants) as http:
        answer = await http.get("/v1/cluster/watch", headers=bearer("acme"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_over_http_a_request_has_the_tenant_of_its_key(of_tenants):
    backend, body = FakeBackend(), {"prompt": "Hi"}
    async with client(backend, keys=of_tenants) as http:
        for path in ("/v1/completions", "/tokenize"):
            assert (await http.post(path, json=body, headers=bearer("acme"))).status_code == 200
            other = {**bearer("acme"), "x-isthmus-tenant": "b"}
            assert (await http.post(path, json=body, headers=other)).status_code == 403
    assert [request.tenant for request in backend.requests] == ["acme", "acme"]


async def test_a_watch_over_http_ends_with_its_key(of_tenants, file):
    sent = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            (new := file.with_name("new")).write_text("bare-key\n")
            os.replace(new, file)

    headers = [(name.encode(), value.encode()) for name, value in bearer("acme").items()]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/cluster/watch",
        "headers": headers,
        "query_string": b"",
    }
    app = app_of(FakeBackend(), ToldWatch(told_for_ever), keys=of_tenants)
    await asyncio.wait_for(app(scope, receive, send), 20)
    assert sent[0]["status"] == 200 and not sent[-1]["body"] and len(sent) == 5


async def test_what_a_call_holds_is_its_keys_tenants(of_tenants):
    """What reads the message stands around the door, and asks for each call on a connection anew."""
    owners = []
    in_flight = BytesInFlight(2000, 1000, owner=lambda: owners.append(callers.tenant_by_key()))
    named = ("acme", "acme"), ("ours", None), ("b", "b"), ("bare", None)
    async with serving(of_tenants, Player(), bounds=servers.ClientBounds(in_flight=in_flight)) as channel:
        for key, _ in named:
            await generate(channel, tuple(bearer(key).items()))
    async with client(FakeBackend(), keys=of_tenants, in_flight=in_flight) as http:
        for key, _ in named:
            await http.get("/v1/models", headers=bearer(key))
    assert owners == 2 * [tenant for _, tenant in named]
