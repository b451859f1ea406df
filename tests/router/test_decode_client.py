"""The router's end of an Attach stream, against a decode rank that misbehaves."""

import asyncio

import pytest

from services import rpc
from services.kv.types import Generation, Plan, RankAddress, RankId
from services.request import GenerationRequest, SamplingParams, StartCommand
from services.router.decode_client import DecodeClient, DecodeRankLost
from services.wire.isthmus.v1 import decode_pb2, decode_pb2_grpc

RANK = RankId("decode", 0, Generation(1))
COMMAND = StartCommand(GenerationRequest("mine", (1, 2), SamplingParams(), plan=Plan.LOCAL))


class Rank(decode_pb2_grpc.DecodeServicer):
    """Answers each Start with what `answer` makes of its request id."""

    def __init__(self, answer):
        self._answer = answer
        self.streams = 0

    async def Attach(self, request_iterator, context):
        self.streams += 1
        await context.write(decode_pb2.StepOutputs(step=1))
        async for command in request_iterator:
            output = self._answer(command.start.request_id)
            await context.write(decode_pb2.StepOutputs(step=2, outputs=[output]))


async def test_what_cannot_be_read_loses_the_stream_and_not_the_client():
    """Else every request on it would wait for ever, and none would be moved."""
    rank = Rank(lambda request_id: decode_pb2.RequestOutput(request_id=request_id, finished=99))
    server = await rpc.open_server(
        "127.0.0.1:0", lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(rank, server), []
    )
    losses = []
    address = RankAddress(RANK, f"127.0.0.1:{server.port}")
    client = DecodeClient(address, None, lambda load: None, lambda: losses.append(1))
    async with asyncio.timeout(10):
        await client.connected.wait()
        with pytest.raises(DecodeRankLost, match="finish_reason"):
            await client.start(COMMAND).next()
        assert losses == [1]
        while rank.streams < 2:
            await asyncio.sleep(0.01)
        await client.connected.wait()
    await client.close()
    await server.stop()
