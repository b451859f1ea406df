"""Who serves what at which endpoint: asking at the wrong one says so."""

from functools import partial

import pytest

from services import rpc
from services.engine.sglang.directory import DirectoryService, look_up
from services.errors import ProtocolError, Unavailable
from services.transfer.handshake_server import HandshakeService
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc


def opened(servicer):
    add = partial(handshake_pb2_grpc.add_HandshakeServicer_to_server, servicer)
    return rpc.open_server("127.0.0.1:0", add, [])


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
        async with rpc.open_channel(endpoint) as channel:
            with pytest.raises(ProtocolError, match="DescribeRanks"), rpc.renaming():
                await handshake_pb2_grpc.HandshakeStub(channel).Connect().read()
    finally:
        await server.stop()
