"""Who connects does so under the files as they are then; what is connected goes on."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import pytest

from net.certificates import Mounted, make_another, make_certificates
from services.net import channels, grpc_errors, servers
from services.net.channels import ReloadingChannel, TlsConfig
from services.values import errors
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

NAME = "DNS:localhost"
READY = grpc.ChannelConnectivity.READY


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    old = make_certificates(folder / "old", NAME)
    make_another(old, folder / "ended", NAME, days=-1)
    make_another(old, folder / "renewed", NAME)
    make_certificates(folder / "new", NAME)  # of another authority
    return folder


@pytest.fixture
def mounted(made, tmp_path):
    return Mounted(tmp_path / "mounted", made / "old")


def tls_in(folder, mutual=False):
    return TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem", mutual)


class Service(generation_pb2_grpc.GenerationServicer):
    """Streams what it is told to, and answers Abort at once."""

    def __init__(self):
        self.texts = asyncio.Queue()
        self.peers = []

    async def Generate(self, request, context):
        while (text := await self.texts.get()) is not None:
            yield generation_pb2.GenerateResponse(text=text)

    async def Abort(self, request, context):
        self.peers.append(context.peer())
        return generation_pb2.AbortResponse(found=True)


@asynccontextmanager
async def serving(service, tls, port=0):
    def register(server):
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server)

    server = await servers.open_server(f"localhost:{port}", register, ["isthmus.v1.Generation"], tls)
    try:
        yield server
    finally:
        await server.stop()


async def call(channel):
    with grpc_errors.renaming():
        stub = generation_pb2_grpc.GenerationStub(channel)
        return await stub.Abort(generation_pb2.AbortRequest(), timeout=10)


async def call_anew(port, tls):
    async with channels.open_channel(f"localhost:{port}", tls) as channel:
        return await call(channel)


async def until_it_answers(channel):
    async with asyncio.timeout(10):
        while True:
            with suppress(errors.PeerFailed):
                return await call(channel)
            await asyncio.sleep(0.02)


async def show_the_new_one(made, mounted, mutual):
    mounted.swap(made / "old")
    old, new = tls_in(made / "old", mutual), tls_in(made / "new", mutual)
    async with serving(Service(), tls_in(mounted.folder, mutual)) as server:
        assert (await call_anew(server.port, old)).found
        mounted.swap(made / "new")
        assert (await call_anew(server.port, new)).found
        with pytest.raises(errors.PeerFailed):
            await call_anew(server.port, old)


async def test_a_server_shows_new_clients_its_new_certificate(made, mounted, subtests):
    for mutual in (False, True):
        with subtests.test(mutual=mutual):
            await show_the_new_one(made, mounted, mutual)


async def test_a_server_outlives_its_certificate_once_there_is_another(made, mounted):
    service, client = Service(), tls_in(made / "old")
    async with (
        serving(service, tls_in(mounted.folder)) as server,
        channels.open_channel(f"localhost:{server.port}", client) as standing,
    ):
        assert (await call(standing)).found
        mounted.swap(made / "ended")
        with pytest.raises(errors.PeerFailed):
            await call_anew(server.port, client)
        assert (await call(standing)).found  # connections that stand are not asked again
        mounted.swap(made / "renewed")
        assert (await call_anew(server.port, client)).found


async def test_a_server_goes_on_with_its_old_pair_while_the_new_one_is_half_there(made, mounted):
    async with serving(Service(), tls_in(mounted.folder)) as server:
        (mounted.folder / "key.pem").unlink()
        (mounted.folder / "key.pem").write_bytes((made / "new" / "key.pem").read_bytes())
        assert (await call_anew(server.port, tls_in(made / "old"))).found


async def test_a_channel_that_is_connected_stays_so(made, mounted):
    service = Service()
    async with (
        serving(service, tls_in(mounted.folder)) as server,
        channels.open_channel(f"localhost:{server.port}", tls_in(mounted.folder)) as channel,
    ):
        await call(channel)
        mounted.swap(made / "new")
        await call(channel)
        assert len(set(service.peers)) == 1


async def connect_again(made, mounted, mutual):
    mounted.swap(made / "old")
    tls = tls_in(mounted.folder, mutual)
    async with AsyncExitStack() as stack:
        async with serving(Service(), tls) as server:
            channel = await stack.enter_async_context(channels.open_channel(f"localhost:{server.port}", tls))
            await call(channel)
        mounted.swap(made / "new")
        async with serving(Service(), tls_in(made / "new", mutual), server.port):
            assert (await until_it_answers(channel)).found


async def test_a_channel_that_must_connect_again_does_so_under_the_new_files(made, mounted, subtests):
    """Another authority and, where clients show one, another certificate."""
    for mutual in (False, True):
        with subtests.test(mutual=mutual):
            await connect_again(made, mounted, mutual)


async def test_a_channel_opened_too_early_finds_its_peer_once_the_files_are_there(made, mounted):
    async with (
        serving(Service(), tls_in(made / "new")) as server,
        channels.open_channel(f"localhost:{server.port}", tls_in(mounted.folder)) as channel,
    ):
        with pytest.raises(errors.PeerFailed):
            await call(channel)
        mounted.swap(made / "new")
        assert (await call(channel)).found  # at once: nothing waits for gRPC's next try
        async with asyncio.timeout(10):
            await channel.channel_ready()
        assert channel.get_state() is READY


async def test_a_stream_goes_on_while_others_connect_under_new_files(made, mounted):
    """The server closes connections in its own time: then the stream and new calls are on two."""
    service, tls = Service(), tls_in(mounted.folder)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(service, tls))
        channel = await stack.enter_async_context(channels.open_channel(f"localhost:{first.port}", tls))
        stream = generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest())
        service.texts.put_nowait("before")
        assert (await stream.read()).text == "before"
        leaving = asyncio.create_task(first.stop(grace_s=30))  # GOAWAY: what runs may end
        async with asyncio.timeout(10):
            while channel.get_state() is READY:
                await asyncio.sleep(0.01)
        mounted.swap(made / "new")
        await stack.enter_async_context(serving(Service(), tls_in(made / "new"), first.port))
        assert (await until_it_answers(channel)).found
        assert len(channel._older) == 1
        service.texts.put_nowait("after")
        assert (await stream.read()).text == "after"
        service.texts.put_nowait(None)
        assert await stream.read() is grpc.aio.EOF
        async with asyncio.timeout(10):
            while channel._older:
                await asyncio.sleep(0.01)
        await leaving


async def test_who_waits_for_an_older_channel_is_let_go(made, mounted):
    async with channels.open_channel("localhost:1", tls_in(mounted.folder)) as channel:
        state = channel.get_state(try_to_connect=True)
        waiting = [asyncio.create_task(channel.wait_for_state_change(state)) for _ in range(3)]
        await asyncio.sleep(0)
        mounted.swap(made / "new")
        channel.get_state(try_to_connect=True)
        async with asyncio.timeout(10):
            await asyncio.gather(*waiting)
            while channel._older:
                await asyncio.sleep(0.01)


async def test_closing_ends_what_older_channels_still_carry(made, mounted):
    service, tls = Service(), tls_in(mounted.folder)
    async with serving(service, tls) as server:
        channel = channels.open_channel(f"localhost:{server.port}", tls)
        stream = generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest())
        service.texts.put_nowait("before")
        await stream.read()
        leaving = asyncio.create_task(server.stop(grace_s=30))
        async with asyncio.timeout(10):
            while channel.get_state() is READY:
                await asyncio.sleep(0.01)
        mounted.swap(made / "new")
        channel.get_state()
        await channel.close()
        assert stream.cancelled()
        async with asyncio.timeout(10):
            await leaving
            while any(task.get_name() == "close-channel" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)


def test_a_channel_hides_nothing_of_grpcs():
    assert not getattr(ReloadingChannel, "__abstractmethods__", None)
