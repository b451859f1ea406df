"""A Generation service that does what a test says, and clients of it."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from services.net import channels, grpc_errors, servers
from services.wire.isthmus.v1 import (
    generation_pb2,
    generation_pb2_grpc,
)

NAMES = ["isthmus.v1.Generation"]


class Service(generation_pb2_grpc.GenerationServicer):
    """Raises what it was given: from a coroutine (Abort) and after one answer of a stream (Generate)."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.running = asyncio.Event()
        self.release = asyncio.Event()
        self.stream_closed = asyncio.Event()
        self.left_s: float | None = None

    async def Abort(self, request, context):
        self.left_s = servers.remaining_s(context)
        if self.error is not None:
            raise self.error
        return generation_pb2.AbortResponse(found=True)

    async def Generate(self, request, context):
        try:
            yield generation_pb2.GenerateResponse(text=request.text)
            if self.error is not None:
                raise self.error
            self.running.set()
            await self.release.wait()
        finally:
            self.stream_closed.set()

    async def ListModels(self, request, context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "by itself")

    async def Explain(self, request, context):
        async with asyncio.timeout(0):
            await self.release.wait()


@asynccontextmanager
async def serving(service, tls=None, client_tls=None, is_serving=True):
    server = await servers.open_server(
        "localhost:0",
        lambda grpc_server: generation_pb2_grpc.add_GenerationServicer_to_server(service, grpc_server),
        NAMES,
        tls,
        is_serving,
    )
    try:
        async with channels.open_channel(f"localhost:{server.port}", client_tls) as channel:
            yield server, channel
    finally:
        await server.stop()


def told(caplog):
    """What was logged, but for what asyncio says of loops of tests before, to which gRPC still has news."""
    return [record for record in caplog.records if record.name != "asyncio"]


def stub_of(channel):
    return generation_pb2_grpc.GenerationStub(channel)


async def call(channel, timeout_s=10.0):
    with grpc_errors.renaming():
        return await stub_of(channel).Abort(generation_pb2.AbortRequest(), timeout=timeout_s)
