"""The router's end of an Attach stream, against a decode rank that misbehaves."""

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial

import pytest

from services.net import channels, servers
from services.router.connections import rank_health
from services.router.connections.rank_connections import DecodeClient, DecodeRankLost
from services.values.errors import InvalidRequest
from services.values.rank import Generation, RankAddress, RankId
from services.values.request import FinishReason
from services.wire.isthmus.v1 import common_pb2, decode_pb2, decode_pb2_grpc

RANK = RankId("decode", 0, Generation(1))


def start(name="mine", prompt_ids=(1, 2)):
    return decode_pb2.Start(request_id=name, prompt_ids=prompt_ids, plan=common_pb2.PLAN_LOCAL)


class Rank(decode_pb2_grpc.DecodeServicer):
    """Answers each Start with what `answer` makes of its request id."""

    def __init__(self, answer):
        self._answer = answer
        self.streams = 0

    async def Attach(self, request_iterator, context):
        self.streams += 1
        await context.write(decode_pb2.StepOutputs())
        async for command in request_iterator:
            output = self._answer(command.start.request_id)
            await context.write(decode_pb2.StepOutputs(outputs=[output]))


class Reporter(decode_pb2_grpc.DecodeServicer):
    """Reports its step every 20 ms until it is told to fall silent."""

    def __init__(self):
        self.step = 0
        self.silent = False

    async def Attach(self, request_iterator, context):
        while True:
            if not self.silent:
                self.step += 1
                await context.write(decode_pb2.StepOutputs())
            await asyncio.sleep(0.02)


@asynccontextmanager
async def client_of(rank):
    """A client of the rank, and the list that grows with every loss."""
    server = await servers.open_server(
        "127.0.0.1:0", lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(rank, server), []
    )
    losses = []
    address = RankAddress(RANK, f"127.0.0.1:{server.port}")
    client = DecodeClient(address, None, lambda load: None, lambda: losses.append(1), lambda coming: None)
    try:
        async with asyncio.timeout(20):
            await client.connected.wait()
            yield client, losses
    finally:
        await client.close()
        await server.stop()


SILENCE_S = 0.4  # 20 ticks


@pytest.fixture
def soon_silent(monkeypatch):
    monkeypatch.setattr(rank_health, "_TICK_S", 0.02)
    monkeypatch.setattr(rank_health, "SILENCE_S", SILENCE_S)


async def test_a_silent_rank_is_lost(soon_silent):
    rank = Reporter()
    async with client_of(rank) as (client, losses):
        stream = client.start(start())
        rank.silent = True
        with pytest.raises(DecodeRankLost, match="silent"):
            await stream.next()
        assert losses == [1]


async def test_a_router_that_did_not_run_blames_no_rank(soon_silent):
    rank = Reporter()
    async with client_of(rank) as (client, losses):
        time.sleep(1.2 * SILENCE_S)
        step = rank.step
        while rank.step < step + 5:
            await asyncio.sleep(0.05)
        assert losses == [] and client.connected.is_set()


async def test_what_cannot_be_read_loses_the_stream_and_not_the_client():
    """Else every request on it would wait for ever, and none would be moved."""
    rank = Rank(lambda request_id: decode_pb2.RequestOutput(request_id=request_id, finished=99))
    async with client_of(rank) as (client, losses):
        with pytest.raises(DecodeRankLost, match="finish_reason"):
            await client.start(start()).next()
        assert losses == [1]
        while rank.streams < 2:
            await asyncio.sleep(0.01)
        await client.connected.wait()


async def test_who_is_retired_lets_what_runs_end(soon_silent, subtests):
    for lost in [False, True]:
        with subtests.test(lost=lost):
            rank = Reporter()
            async with client_of(rank) as (client, _):
                streams = [client.start(start()) for _ in range(2)]
                retiring = asyncio.create_task(client.retire())
                if lost:
                    rank.silent = True
                    for stream in streams:
                        with pytest.raises(DecodeRankLost, match="silent"):
                            await stream.next()
                else:
                    streams[0].close()
                    step = rank.step
                    while rank.step < step + 5:
                        await asyncio.sleep(0.01)
                    assert client.connected.is_set() and not retiring.done()
                    streams[1].close()
                async with asyncio.timeout(20):
                    await retiring
                assert not client.connected.is_set()


async def test_a_request_that_no_message_holds_fails_alone(monkeypatch):
    """Its write would end the stream, and with it every request of the rank."""
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 1_000)
    ended = partial(decode_pb2.RequestOutput, finished=common_pb2.FINISH_REASON_STOP)
    async with client_of(Rank(lambda request_id: ended(request_id=request_id))) as (client, losses):
        stream = client.start(start())
        large = start(prompt_ids=(500,) * 500)
        with pytest.raises(InvalidRequest, match=r"too large: 1[0-9]{3} bytes, and a message holds 1000"):
            client.start(large)
        assert (await stream.next()).finished is FinishReason.STOP
        assert losses == []


class Numbered(decode_pb2_grpc.DecodeServicer):
    """Answers each Start with the step that `answer` makes of its request id and number."""

    def __init__(self, answer):
        self._answer = answer

    async def Attach(self, request_iterator, context):
        await context.write(decode_pb2.StepOutputs())
        async for command in request_iterator:
            if command.HasField("start"):
                await context.write(self._answer(command.start.request_id, command.start.number))


def numbered_step(request_id, number):
    last = decode_pb2.RequestOutput(
        request_id=request_id, token_ids=[number], finished=common_pb2.FINISH_REASON_STOP
    )
    numbers, token_ids = [number, 10_000 + number, number], [5, 6, 7]  # one of them is long forgotten
    return decode_pb2.StepOutputs(outputs=[last], numbers=numbers, token_ids=token_ids)


async def test_tokens_come_under_the_number_of_their_request_and_before_its_outputs():
    async with client_of(Numbered(numbered_step)) as (client, losses):
        numbers = []
        for stream in [client.start(start()) for _ in range(2)]:
            assert (await stream.next()).token_ids == (5, 7)
            last = await stream.next()
            assert last.finished is FinishReason.STOP
            numbers += last.token_ids
            stream.close()
        assert len(set(numbers)) == 2 and 0 not in numbers
        assert losses == [] and not client._streams and not client._numbers


async def test_tokens_without_as_many_numbers_lose_the_stream():
    rank = Numbered(lambda _, number: decode_pb2.StepOutputs(numbers=[number], token_ids=[5, 6]))
    async with client_of(rank) as (client, losses):
        with pytest.raises(DecodeRankLost, match="1 numbers of requests for 2 tokens"):
            await client.start(start()).next()
        assert losses == [1]


class Batches(decode_pb2_grpc.DecodeServicer):
    """Notes how many Starts each message brings; reads none before it is released."""

    def __init__(self, takes_further):
        self._takes_further = takes_further
        self.release = asyncio.Event()
        self.starts = []

    async def Attach(self, request_iterator, context):
        await context.write(decode_pb2.StepOutputs(takes_further=self._takes_further))
        await self.release.wait()
        async for command in request_iterator:
            self.starts.append([each.start.request_id for each in (command, *command.further)])


async def test_requests_of_a_moment_go_in_a_message_if_the_rank_reads_them(subtests):
    for takes_further in [True, False]:
        with subtests.test(takes_further=takes_further):
            rank = Batches(takes_further)
            async with client_of(rank) as (client, _):
                names = [f"request-{number}" for number in range(20)]
                for name in names:
                    client.start(start(name))
                rank.release.set()
                while sum(map(len, rank.starts)) < len(names):
                    await asyncio.sleep(0.01)
            assert [name.partition("#")[0] for names in rank.starts for name in names] == names
            assert len(rank.starts) == (1 if takes_further else len(names))
