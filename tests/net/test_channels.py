import grpc
import pytest

from net.echo import NAMES, Service, call, serving, stub_of
from services.host.ports import free_ports
from services.net import channels, grpc_errors, servers
from services.values import errors
from services.wire.isthmus.v1 import (
    generation_pb2,
    generation_pb2_grpc,
)


@pytest.mark.long
async def test_channels(subtests):
    with subtests.test("a new channel does not wait out the backoff of an old one"):
        (port,) = free_ports("127.0.0.1", 1)
        endpoint = f"127.0.0.1:{port}"
        service = Service()
        async with channels.open_channel(endpoint) as old, channels.open_channel(endpoint) as new:
            with pytest.raises(grpc.aio.AioRpcError):  # by then it waits long before its next try
                await stub_of(old).Abort(generation_pb2.AbortRequest(), timeout=0.5, wait_for_ready=True)
            server = await servers.open_server(
                endpoint, lambda s: generation_pb2_grpc.add_GenerationServicer_to_server(service, s), NAMES
            )
            try:
                assert (await call(new)).found
            finally:
                await server.stop()
    with subtests.test("ten megabytes pass and too much is an invalid request"):
        async with serving(Service(errors.Aborted("read"))) as (_, channel):

            async def send(size):
                with grpc_errors.renaming():
                    async for _ in stub_of(channel).Generate(generation_pb2.GenerateRequest(text="x" * size)):
                        pass

            with pytest.raises(errors.Aborted):
                await send(10 * 2**20)
            with pytest.raises(errors.InvalidRequest, match="too large"):
                await send(channels.MAX_MESSAGE_BYTES)
