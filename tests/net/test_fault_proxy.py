"""The proxy does to connections what it says, and to no others."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from net.fault_proxy import FaultProxy

LONG_S = 30.0  # a deadline, never waited out


async def echo(reader, writer):
    while piece := await reader.read(100):
        writer.write(piece)
    writer.close()


@asynccontextmanager
async def proxied():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with FaultProxy("127.0.0.2", 0, "127.0.0.1", port) as proxy:
        yield proxy
    server.close()


class Client:
    def __init__(self, path):
        self.path = path

    async def connect(self, proxy):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.2", proxy.port)
        return self

    def say(self, text):
        self.writer.write(text)

    async def hears(self, text):
        async with asyncio.timeout(LONG_S):
            return await self.reader.readexactly(len(text)) == text

    async def is_echoed(self, text):
        self.say(text)
        return await self.hears(text)


PATHS = [b"\x00/isthmus.v1.Handshake/Connect", b"\x00/isthmus.v1.Prefill/Prefill"]


async def clients(proxy):
    made = [await Client(path).connect(proxy) for path in PATHS]
    assert all([await client.is_echoed(client.path) for client in made])
    return made


async def test_cut_and_stalled_connections(subtests):
    with subtests.test("a cut service is reset and the others go on"):
        async with proxied() as proxy:
            handshake, prefill = await clients(proxy)
            proxy.cut("Handshake")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await handshake.is_echoed(b"still there?")
            assert await prefill.is_echoed(b"still there?")
            again = await Client(PATHS[0]).connect(proxy)
            assert await again.is_echoed(b"hello ")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await again.is_echoed(PATHS[0])
            proxy.heal()
            assert await (await Client(PATHS[0]).connect(proxy)).is_echoed(PATHS[0])
    with subtests.test("what is stalled goes on when it is healed"):
        async with proxied() as proxy:
            handshake, prefill = await clients(proxy)
            proxy.stall("Handshake")
            handshake.say(b"late")
            assert await prefill.is_echoed(b"in time")
            hears = asyncio.create_task(handshake.hears(b"late"))
            assert await prefill.is_echoed(b"and again")
            assert not hears.done()
            proxy.heal()
            assert await hears
