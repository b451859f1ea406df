import asyncio
import contextlib

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from net.echo import NAMES, Service, stub_of
from services.net import bytes_in_flight, channels, servers
from services.net.bytes_in_flight import BytesInFlight
from services.values import errors
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

LARGEST = 100


def bounded(most: int, refused: list[int] | None = None) -> BytesInFlight:
    """`most` beside what is for messages on their way: two places of the largest."""
    noted = [] if refused is None else refused
    return BytesInFlight(most + 2 * LARGEST, LARGEST, lambda: noted.append(1))


async def test_bounds_of_bytes(subtests):
    with subtests.test("what a call holds is let go at its end however it ends"):
        refused: list[int] = []
        in_flight = bounded(250, refused)
        with in_flight.call() as one:
            one.add(150)
            with pytest.raises(errors.NoCapacity) as caught, in_flight.call() as other:
                other.add(50)
                other.add(60)
            assert caught.value.retry_after_s == 1.0
            assert (in_flight.held, refused) == (150, [1])
        assert in_flight.held == 0
        with in_flight.call() as again:
            again.add(250)
        assert in_flight.held == 0
    with (
        subtests.test("a bound that cannot hold two messages is refused"),
        pytest.raises(errors.ConfigError, match="--max-bytes-in-flight must hold two"),
    ):
        BytesInFlight(2 * LARGEST - 1, LARGEST)
    with subtests.test("nobody alone fills the bound where calls have owners"):
        owner = None
        in_flight = BytesInFlight(1000 + 10 * 100, 100, owner=lambda: owner)  # 1000 beside ten places

        def holds(num_messages: int) -> int:
            for done in range(num_messages):
                held = stack.enter_context(in_flight.call())
                try:
                    held.add(100)
                except errors.NoCapacity:
                    return done
            return num_messages

        with contextlib.ExitStack() as stack:
            told = []
            for owner in ("a", "b", "c", "a", "d", "e"):
                told.append((owner, holds(20)))
            assert told == [("a", 5), ("b", 3), ("c", 2), ("a", 0), ("d", 0), ("e", 0)]
        assert (in_flight.held, in_flight._held_by) == (0, {})
        with contextlib.ExitStack() as stack:
            owner = None
            assert holds(20) == 10
        with BytesInFlight(200, 100, owner=lambda: "a").call() as held:
            held.add(100)  # one message, though it is more than a share
    with subtests.test("a message is held in place of the one before it"):
        in_flight = bounded(250)
        messages = iter([b"a" * 100, b"b" * 40, grpc.aio.EOF])

        async def read():
            return next(messages)

        with in_flight.call() as held:
            sizes = []
            for _ in range(3):
                await held.read_next(read)
                sizes.append(in_flight.held)
        assert sizes == [100, 40, 0]


def test_places(subtests):
    # 30 a second, each 150 ms on its way, with three places: 20 a second can be served.
    with subtests.test("where more come than there are places those that have one are read to their end"):
        places, ended = bytes_in_flight.Places(3), list[int]()
        served = 0
        for number in range(90):
            if number >= 5:  # what began 5 / 30 s ago has come
                served += number - 5 not in ended
                places.end(number - 5)
            places.begin(number, lambda number=number: ended.append(number), number / 30)
        assert served >= 50
        assert len(places) <= 3
    with subtests.test("whoever sends nothing keeps a place only until another needs it"):
        places, ended = bytes_in_flight.Places(2), list[str]()
        for name, now_s in (("a", 0.0), ("b", 0.5), ("too soon", 0.9), ("c", 1.0), ("too soon, too", 1.4)):
            places.begin(name, lambda name=name: ended.append(name), now_s)
        assert ended == ["too soon", "a", "too soon, too"]
        assert len(places) == 2


async def test_an_old_message_makes_room_for_a_new_one(subtests, monkeypatch):
    with subtests.test("of messages on their way an old one makes room"), monkeypatch.context() as patch:
        patch.setattr(bytes_in_flight, "EARLY_S", 0.0)
        patch.setattr(bytes_in_flight, "OLD_S", 0.0)
        in_flight = bounded(250)
        never, arrived = asyncio.Event(), asyncio.Event()

        async def silent() -> None:
            with in_flight.call() as held:
                await held.read(never.wait)

        async def slow() -> bytes:
            await arrived.wait()
            return b"come"

        async def in_time() -> bytes:
            with in_flight.call() as held:
                return await held.read(slow)

        silent_ones = [asyncio.create_task(silent()) for _ in range(2)]
        await asyncio.sleep(0.02)
        last = asyncio.create_task(in_time())
        with pytest.raises(errors.NoCapacity):
            await silent_ones[0]
        arrived.set()
        assert await last == b"come"
        assert not silent_ones[1].done()
        silent_ones[1].cancel()
        await asyncio.gather(*silent_ones, return_exceptions=True)
        assert in_flight.held == 0
        assert not len(in_flight.places)
    # Its time is over, and its reading still has to hear of it.
    with subtests.test("one that ends by itself makes room as well"), monkeypatch.context() as patch:
        patch.setattr(bytes_in_flight, "EARLY_S", 0.0)
        patch.setattr(bytes_in_flight, "OLD_S", 0.0)
        patch.setattr(bytes_in_flight, "SLOW_S", 0.1)
        in_flight = BytesInFlight(2 * LARGEST, LARGEST)  # one place
        is_over, came_after = asyncio.Event(), asyncio.Event()
        failed: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                is_over.set()
                await came_after.wait()

        async def read(what) -> object:
            with in_flight.call() as held:
                return await held.read(what)

        first = asyncio.create_task(read(slow_to_end))
        await is_over.wait()
        patch.setattr(bytes_in_flight, "SLOW_S", 60.0)
        newcomer = asyncio.create_task(read(asyncio.Event().wait))
        await asyncio.sleep(0.05)
        came_after.set()
        with pytest.raises(errors.DeadlineExceeded):
            await first
        assert len(in_flight.places) == 1
        newcomer.cancel()
        await asyncio.gather(newcomer, return_exceptions=True)
        assert not failed


async def test_streams_that_are_idle(subtests, monkeypatch):
    with subtests.test("a message that never comes ends its call"), monkeypatch.context() as patch:
        patch.setattr(bytes_in_flight, "SLOW_S", 0.05)
        with pytest.raises(errors.DeadlineExceeded, match="did not come within"), bounded(250).call() as held:
            await held.read(asyncio.Event().wait)
    # As that of a client of reflection is between its questions: it takes no place of a large message.
    with subtests.test("a stream may be idle"), monkeypatch.context() as patch:
        patch.setattr(bytes_in_flight, "EARLY_S", 0.0)
        patch.setattr(bytes_in_flight, "SLOW_S", 0.05)
        patch.setattr(bytes_in_flight, "OLD_S", 0.0)
        patch.setattr(bytes_in_flight, "STREAMS", 2)
        in_flight, asked = BytesInFlight(2 * LARGEST, LARGEST), asyncio.Event()  # one place

        async def question() -> bytes:
            await asked.wait()
            return b"a"

        async def read_next() -> bytes:
            with in_flight.call() as held:
                return await held.read_next(question)

        idle = [asyncio.create_task(read_next()) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert not any(stream.done() for stream in idle)
        assert (len(in_flight.places), len(in_flight.streams)) == (0, 2)
        one_more = asyncio.create_task(read_next())
        with pytest.raises(errors.NoCapacity):
            await idle[0]
        asked.set()
        assert [await idle[1], await one_more] == [b"a", b"a"]
        assert (in_flight.held, len(in_flight.streams)) == (0, 0)
    with subtests.test("reflection is left idle without an end"), monkeypatch.context() as patch:
        patch.setattr(bytes_in_flight, "EARLY_S", 0.0)
        patch.setattr(bytes_in_flight, "SLOW_S", 0.05)
        in_flight = BytesInFlight(2000, 1000)
        bounds = servers.ClientBounds(1000, in_flight)

        def register(server: grpc.aio.Server) -> None:
            generation_pb2_grpc.add_GenerationServicer_to_server(Service(), server)

        server = await servers.open_server("localhost:0", register, NAMES, bounds=bounds)
        try:
            async with channels.open_channel(f"localhost:{server.port}") as channel, asyncio.timeout(10):
                ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
                for _ in range(2):
                    await ask.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                    assert (await ask.read()).list_services_response.service
                    await asyncio.sleep(0.1)
                assert (len(in_flight.places), len(in_flight.streams)) == (0, 1)
                await ask.done_writing()
                assert await ask.code() is grpc.StatusCode.OK
        finally:
            await server.stop()


async def test_a_server_refuses_above_the_bound_and_serves_when_one_has_ended():
    service = Service()
    largest = 3000
    bounds = servers.ClientBounds(largest, BytesInFlight(4 * largest, largest))

    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server)

    server = await servers.open_server("localhost:0", register, NAMES, bounds=bounds)
    text = "a" * 2500
    try:
        async with channels.open_channel(f"localhost:{server.port}") as channel:
            stub = stub_of(channel)
            calls = [stub.Generate(generation_pb2.GenerateRequest(text=text)) for _ in range(2)]
            for call in calls:
                await call.read()
            refused = stub.Generate(generation_pb2.GenerateRequest(text=text))
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "--max-bytes-in-flight" in await refused.details()
            assert ("grpc-retry-pushback-ms", "1000") in tuple(await refused.trailing_metadata())
            service.release.set()
            for call in calls:
                assert await call.code() is grpc.StatusCode.OK
            assert (await stub.Abort(generation_pb2.AbortRequest())).found
            too_large = stub.Generate(generation_pb2.GenerateRequest(text="a" * (largest + 1)))
            assert await too_large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in await too_large.details()
            assert bounds.in_flight is not None
            assert bounds.in_flight.held == 0
    finally:
        await server.stop()


@pytest.mark.long
async def test_connections_are_bounded_and_idle_ones_told_to_go():
    """grpcio closes a connection above the number as soon as it has accepted it."""

    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(Service(), server)

    async def told(channel: grpc.aio.Channel) -> grpc.StatusCode:
        try:
            await stub_of(channel).Abort(generation_pb2.AbortRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    bounds = servers.ClientBounds(max_connections=1, idle_s=1.0)
    server = await servers.open_server("127.0.0.1:0", register, NAMES, bounds=bounds)
    try:
        endpoint = f"127.0.0.1:{server.port}"
        async with channels.open_channel(endpoint) as one, channels.open_channel(endpoint) as another:
            assert await told(one) is grpc.StatusCode.OK
            assert await told(another) is grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(30):  # the first leaves by itself, with no call on it
                while await told(another) is not grpc.StatusCode.OK:
                    await asyncio.sleep(0.1)
    finally:
        await server.stop()
