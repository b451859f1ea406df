"""These tests show who serves what at which endpoint: asking at the wrong one says so."""

from concurrent.futures import Future
from functools import partial

import pytest

from services.engine.sglang.directory import Directory, DirectoryService, Lookups, look_up
from services.net import channels, grpc_errors, servers
from services.transfer.sending.handshake_server import HandshakeService
from services.values.errors import ProtocolError, Unavailable
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc


def opened(servicer):
    add = partial(handshake_pb2_grpc.add_HandshakeServicer_to_server, servicer)
    return servers.open_server("127.0.0.1:0", add, [])


async def test_a_rank_that_serves_connect_itself_has_no_directory():
    server = await opened(HandshakeService(sender=None))
    try:
        with pytest.raises(ProtocolError, match="serves Connect at this endpoint"):
            await look_up(f"127.0.0.1:{server.port}", None)
    finally:
        await server.stop()


async def test_a_directory_serves_no_connect_and_is_empty_before_its_ranks_stand():
    server = await opened(DirectoryService(handshake_pb2.DescribeRanksResponse()))
    endpoint = f"127.0.0.1:{server.port}"
    try:
        with pytest.raises(Unavailable, match="no ranks yet"):
            await look_up(endpoint, None)
        async with channels.open_channel(endpoint) as channel:
            with pytest.raises(ProtocolError, match="DescribeRanks"), grpc_errors.renaming():
                await handshake_pb2_grpc.HandshakeStub(channel).Connect().read()
    finally:
        await server.stop()


class Asking:
    """Remembers who was asked; the test answers. Its time stands still until it is set."""

    def __init__(self):
        self.futures, self.now = [], 100.0
        self.lookups = Lookups(self.ask, lambda: self.now)

    def ask(self, endpoint):
        self.futures.append(Future())
        return self.futures[-1]


ONE, OTHER = Directory({(0, 0, 0, 0): "h:1"}, {}), Directory({(0, 0, 0, 0): "h:2"}, {})


def test_an_answer_is_taken_once_while_somebody_waits(subtests):
    with subtests.test("an answer is waited for and taken once"):
        asking = Asking()
        assert asking.lookups.take("h:9", 0.0) is None
        assert asking.lookups.take("h:9", 0.0) is None
        asking.futures[0].set_result(ONE)
        asking.now += 2.9
        assert asking.lookups.take("h:9", 0.0) is ONE
        assert asking.lookups.take("h:9", 0.0) is None
        assert len(asking.futures) == 2
    with subtests.test("an answer that nobody waited for is not believed later"):
        asking = Asking()
        assert asking.lookups.take("h:9", 0.0) is None
        asking.futures[0].set_result(ONE)
        asking.now += 3.1
        assert asking.lookups.take("h:9", 0.0) is None  # asked again
        asking.futures[1].set_result(OTHER)
        assert asking.lookups.take("h:9", 0.0) is OTHER
    with subtests.test("a slow answer is as good as a quick one"):
        asking = Asking()
        assert asking.lookups.take("h:9", 0.0) is None
        asking.now += 14.0
        asking.futures[0].set_result(ONE)
        assert asking.lookups.take("h:9", 0.0) is ONE
    with subtests.test("a failure is told and asked for again"):
        asking = Asking()
        assert asking.lookups.take("h:9", 0.0) is None
        asking.futures[0].set_exception(Unavailable("gone"))
        with pytest.raises(Unavailable, match="gone"):
            asking.lookups.take("h:9", 0.0)
        assert asking.lookups.take("h:9", 0.0) is None
        assert len(asking.futures) == 2
