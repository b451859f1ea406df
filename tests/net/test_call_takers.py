"""Calls that are taken up several at a time."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import asynccontextmanager

import grpc
import pytest

from net.echo import NAMES, stub_of
from services.net import channels, grpc_errors, servers
from services.values.errors import NoCapacity
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

GENERATE = "/isthmus.v1.Generation/Generate"
MANY = 64


class Generation(generation_pb2_grpc.GenerationServicer):
    """Every call runs until it is released; then it ends as it was told to."""

    def __init__(self, error=None):
        self.error = error
        self.running = self.ended = 0
        self.release = asyncio.Event()

    async def Generate(self, request, context):
        self.running += 1
        try:
            await self.release.wait()
            if self.error is not None:
                raise self.error
            await context.write(generation_pb2.GenerateResponse(text=request.text))
        finally:
            self.running -= 1
            self.ended += 1


class Door(grpc.aio.ServerInterceptor):
    """Counts who goes through."""

    def __init__(self):
        self.seen = 0

    async def intercept_service(self, continuation, details):
        self.seen += 1
        return await continuation(details)


@asynccontextmanager
async def serving(service, *interceptors, busy=True):
    handler = grpc.unary_stream_rpc_method_handler(
        service.Generate,
        request_deserializer=generation_pb2.GenerateRequest.FromString,
        response_serializer=generation_pb2.GenerateResponse.SerializeToString,
    )
    server = await servers.open_server(
        "localhost:0",
        lambda made: generation_pb2_grpc.add_GenerationServicer_to_server(service, made),
        NAMES,
        interceptors=interceptors,
        busy={GENERATE: handler} if busy else {},
    )
    try:
        async with channels.open_channel(f"localhost:{server.port}") as channel:
            yield server, channel
    finally:
        await server.stop()


async def answer(channel, text="hello"):
    with grpc_errors.renaming():
        stream = stub_of(channel).Generate(generation_pb2.GenerateRequest(text=text))
        return [response.text async for response in stream]


async def until(told):
    async with asyncio.timeout(20):
        while not told():
            await asyncio.sleep(0.01)


def test_the_grpcio_that_is_installed_is_known(caplog):
    async def look():
        return servers.inner_server(grpc.aio.server())

    assert asyncio.run(look()) is not None
    assert "grpcio_unknown" not in caplog.text


async def turns_until_all_run(service, port):
    """Of a loop that is busy, with MANY calls of a client that does not need it."""
    called, answered = threading.Event(), []

    def ask():
        with grpc.insecure_channel(f"localhost:{port}") as channel:
            generate = generation_pb2_grpc.GenerationStub(channel).Generate
            calls = [generate(generation_pb2.GenerateRequest(), timeout=60) for _ in range(MANY)]
            called.set()
            answered.extend(list(call) for call in calls)

    client = threading.Thread(target=ask)
    client.start()
    called.wait(60)
    time.sleep(0.5)  # they are on their way, and this loop has not turned
    turns = 0
    while service.running < MANY:
        time.sleep(0.005)
        await asyncio.sleep(0)
        turns += 1
    service.release.set()
    await asyncio.to_thread(client.join)
    assert len(answered) == MANY
    return turns


@pytest.mark.long
async def test_a_busy_loop(subtests):
    with subtests.test("a busy loop takes up several calls a turn"):
        service = Generation()
        async with serving(service) as (server, _):
            assert await turns_until_all_run(service, server.port) < MANY
    # Which is why: should this fail, gRPC has learned it, and takers can go.
    with subtests.test("one by one it takes turns for each"):
        service = Generation()
        async with serving(service, busy=False) as (server, _):
            assert await turns_until_all_run(service, server.port) > MANY


async def test_handlers(subtests):
    with subtests.test("all go through the door and are answered"):
        service, door = Generation(), Door()
        service.release.set()
        async with serving(service, door) as (_, channel):
            texts = [f"text {number}" for number in range(MANY)]
            assert await asyncio.gather(*(answer(channel, text) for text in texts)) == [[t] for t in texts]
            assert door.seen == service.ended == MANY
    with subtests.test("what a handler raises is its callers"):
        service = Generation(NoCapacity("full", 2.0))
        service.release.set()
        async with serving(service) as (_, channel):
            told = await asyncio.gather(*(answer(channel) for _ in range(MANY)), return_exceptions=True)
            assert [(type(error), str(error)) for error in told] == [(NoCapacity, "full")] * MANY
    with subtests.test("who leaves cancels its handler"):
        service = Generation()
        async with serving(service) as (_, channel):
            stub = stub_of(channel)
            calls = [stub.Generate(generation_pb2.GenerateRequest()) for _ in range(MANY)]
            await until(lambda: service.running == MANY)
            for call in calls:
                call.cancel()
            await until(lambda: service.running == 0)
            assert service.ended == MANY


async def test_takers_end_with_their_server(subtests):
    with subtests.test("takers end with their server and leave nothing"):
        before, service = asyncio.all_tasks(), Generation()
        async with serving(service) as (server, channel):
            answers = [asyncio.ensure_future(answer(channel)) for _ in range(MANY)]
            await until(lambda: service.running == MANY)
            stopping = asyncio.create_task(server.stop(20.0))
            await asyncio.sleep(0.05)
            service.release.set()
            assert await asyncio.gather(*answers) == [["hello"]] * MANY
            await asyncio.wait_for(stopping, 10)
            takers = [task for each in server._takers for task in each._takers]
            assert takers and all(task.done() for task in takers)
            assert not any(each._calls for each in server._takers)
        await until(lambda: asyncio.all_tasks() <= before)
    with subtests.test("what still runs when the grace is over is cancelled"):
        service = Generation()
        async with serving(service) as (server, channel):
            answers = [asyncio.ensure_future(answer(channel)) for _ in range(MANY)]
            await until(lambda: service.running == MANY)
            await asyncio.wait_for(server.stop(0.05), 10)
            told = await asyncio.gather(*answers, return_exceptions=True)
            assert all(isinstance(error, Exception) for error in told)
            assert service.running == 0


async def test_another_grpcio_serves_one_by_one_and_says_so(subtests, monkeypatch, caplog):
    for name, other in [
        ("_NAMES", ("no_such_name",)),
        ("_ARGUMENTS", {"_handle_rpc": ("another",)}),
        ("_ARGUMENTS", {"no_such_name": ("one",)}),
    ]:
        with subtests.test(name=name, other=other), monkeypatch.context() as patch:
            patch.setattr(servers, name, other)
            service = Generation()
            service.release.set()
            async with serving(service) as (server, channel):
                assert server._takers == []
                assert await answer(channel) == ["hello"]
            assert "grpcio_unknown" in caplog.text


class Broken:
    """A server of which takers ask in vain, as often as `errors` says, before it stops."""

    def __init__(self, *errors):
        self._errors = list(errors)

    def is_running(self):
        return bool(self._errors)

    async def _request_registered_call(self, method):
        raise self._errors.pop(0)


async def takers_of(server, count=1):
    handler = grpc.unary_stream_rpc_method_handler(lambda *_: None)
    takers = servers.CallTakers(server, GENERATE, handler, (), count)
    await asyncio.wait_for(takers.ended(), 10)


async def test_takers_that_fail_or_wait(subtests, caplog):
    with subtests.test("a call that never comes is asked for again"):
        missed = servers.cygrpc._RequestCallError
        server = Broken(missed(), missed(), missed())
        await takers_of(server)
        assert not server.is_running()
    with subtests.test("a taker that fails says so and leaves the others and the stop alone"):
        await takers_of(Broken(ZeroDivisionError("of the core"), servers.cygrpc._RequestCallError()), count=2)
        assert caplog.text.count("call_taker_failed") == 1 and "of the core" in caplog.text


async def test_a_taker_that_waits_keeps_no_call_that_is_over():
    class Asked(generation_pb2_grpc.GenerationServicer):
        def __init__(self):
            self.requests = weakref.WeakSet()

        async def Generate(self, request, context):
            kept = Kept()
            self.requests.add(kept)
            raise NoCapacity("full")

    service = Asked()
    async with serving(service) as (_, channel):
        await asyncio.gather(*(answer(channel) for _ in range(MANY)), return_exceptions=True)
        await asyncio.sleep(0.1)
        gc.collect()
        assert len(service.requests) <= 1  # grpc.aio's own loop keeps one


class Kept:
    """What a handler has while it runs."""
