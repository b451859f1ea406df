"""A router that answers as it is told, one step of its script for each call, and notes what it was asked."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from services.net import servers
from services.router.api_keys import GrpcDoor
from services.values.errors import IsthmusError
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
FOR_EVER = object()  # as a step of an answer: nothing more comes


class ScriptedRouter(generation_pb2_grpc.GenerationServicer):
    """Each step is an error to raise, or a list of what an answer sends: responses, errors, FOR_EVER."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.requests = []
        self.deadlines = []
        self.running = 0
        self.ended = asyncio.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.running += 1
        try:
            step = self.steps.pop(0)
            for part in step if isinstance(step, list) else [step]:
                if part is FOR_EVER:
                    await asyncio.sleep(60)
                if isinstance(part, IsthmusError):
                    raise part
                await context.write(part)
        finally:
            self.running -= 1
            self.ended.set()

    async def ListModels(self, request, context):
        self.requests.append(request)
        step = self.steps.pop(0)
        if step is FOR_EVER:
            await asyncio.sleep(60)
        if isinstance(step, IsthmusError):
            raise step
        return step


@asynccontextmanager
async def serving(router, keys=None, tls=None):
    """Yields HOST:PORT."""
    doors = [] if keys is None else [GrpcDoor(keys)]
    server = await servers.open_server(
        "127.0.0.1:0",
        lambda made: generation_pb2_grpc.add_GenerationServicer_to_server(router, made),
        [SERVICE],
        tls,
        interceptors=doors,
    )
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


def said(text, *ids, **fields):
    return generation_pb2.GenerateResponse(request_id="r", text=text, token_ids=ids, **fields)


def finished(text="", *ids, reason=common_pb2.FINISH_REASON_STOP, **fields):
    return said(text, *ids, finish=generation_pb2.Finish(reason=reason), **fields)


class Pauses:
    """Instead of time: `sleep` notes how long, and the clock goes on by it."""

    def __init__(self):
        self.slept = []
        self.now = 100.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_aio(self, seconds):
        self.sleep(seconds)


def status(code, details="", metadata=()):
    """A call of gRPC's that failed so."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)
