"""The gRPC front, before a generator that plays."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from router.http.backend import models_of
from services.net import channels, servers
from services.router.dialects.sampling import SamplingDefaults
from services.router.generation_service import GenerationService, add_to_server
from services.wire.generation_messages import PackedIds
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

DEADLINE_S = 20.0


class Talker:
    """A generator whose answers never end. Each is more than a connection takes unread."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def time_limit_s(self, timeout_s):
        return 0.5 if timeout_s is None else timeout_s

    async def generate(self, request, timeout_s, traceparent, **_):
        try:
            while True:
                yield generation_pb2.GenerateResponse(text="x" * (8 << 20))
        finally:
            self.closed.set()


@pytest.fixture
async def talker():
    return Talker()


@asynccontextmanager
async def serving(service):
    server = await servers.open_server(
        "127.0.0.1:0",
        partial(add_to_server, service),
        [],
    )
    async with channels.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield generation_pb2_grpc.GenerationStub(channel)
    await server.stop()


@pytest.fixture
async def stub(talker):
    async with serving(GenerationService(models_of(talker), None)) as stub:
        yield stub


async def test_a_client_that_stops_reading_is_not_waited_for_longer_than_its_request_may_take(stub, talker):
    call = stub.Generate(generation_pb2.GenerateRequest(text="Hi"))
    await call.read()
    await asyncio.wait_for(talker.closed.wait(), DEADLINE_S)
    assert not call.done()
    call.cancel()


async def test_a_client_that_leaves_closes_its_generation(stub, talker):
    call = stub.Generate(generation_pb2.GenerateRequest(text="Hi"), timeout=DEADLINE_S)
    await call.read()
    call.cancel()
    await asyncio.wait_for(talker.closed.wait(), DEADLINE_S)


class Reader(Talker):
    """A generator that tells its prompt, in two responses, and keeps what it was asked."""

    async def generate(self, request, timeout_s, traceparent, *, ids=None, report_prompt):
        self.asked = request
        self.ids_apart = None if ids is None else list(ids.ids)
        report_prompt(PackedIds.of(request.token_ids.ids) if ids is None else ids)
        for text in ("a", "b"):
            yield generation_pb2.GenerateResponse(text=text)


async def test_a_prompt_of_ids_comes_and_goes_with_the_first_response(subtests):
    for num_ids, apart in ((10, False), (1_000, True)):
        with subtests.test(num_ids=num_ids):
            await send_ids(num_ids, apart)


async def send_ids(num_ids, apart):
    reader, prompt = Reader(), [200 + i for i in range(num_ids)]
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt), conversation_id="c"
    )
    async with serving(GenerationService(models_of(reader), None)) as stub:
        responses = [response async for response in stub.Generate(request, timeout=DEADLINE_S)]
    assert [response.text for response in responses] == ["a", "b"]
    assert [list(response.prompt_token_ids) for response in responses] == [prompt, []]
    assert reader.asked.conversation_id == "c" and reader.asked.WhichOneof("prompt") == "token_ids"
    assert reader.ids_apart == (prompt if apart else None)


async def test_what_is_unset_is_the_models_own():
    reader, defaults = Reader(), SamplingDefaults(temperature=0.5, top_k=7)
    service = GenerationService(models_of(reader, defaults), None)
    request = generation_pb2.GenerateRequest(text="Hi", sampling={"temperature": 0, "min_p": 0.25})
    async with serving(service) as stub:
        assert [response.text async for response in stub.Generate(request, timeout=DEADLINE_S)] == ["a", "b"]
        sampling = reader.asked.sampling
        assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0, 7, 0.25)
        assert not sampling.HasField("top_p")
        request.ClearField("sampling")
        assert [response.text async for response in stub.Generate(request, timeout=DEADLINE_S)] == ["a", "b"]
        assert reader.asked.sampling.temperature == 0.5


async def test_who_watches_and_does_not_read_is_left_in_time(monkeypatch):
    monkeypatch.setattr("services.router.generation_service._UNREAD_S", 0.2)
    closed = asyncio.Event()

    async def follow(request):
        try:
            while True:
                yield generation_pb2.WatchClusterResponse(degraded="x" * (8 << 20))
        finally:
            closed.set()

    watch = SimpleNamespace(follow=follow)
    service = GenerationService(models_of(SimpleNamespace()), watch)
    async with serving(service) as stub:
        call = stub.WatchCluster(generation_pb2.WatchClusterRequest())
        await call.read()
        await asyncio.wait_for(closed.wait(), DEADLINE_S)
        assert not call.done()
        call.cancel()
