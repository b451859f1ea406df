"""Users of a cluster: conversations of several turns; mistakes, changes of mind, and a rank that dies."""

import asyncio
import contextlib
import itertools
import os
import random
import signal

import grpc

from cluster.harness import ids_request
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_VOCABULARY = range(10, 500)
_USERS = 6
_TURNS = 5
_OUTPUT_TOKENS = 24


async def run_load(stubs, seconds, kill_a_rank):
    """For so many seconds; `kill_a_rank()` is called in the middle. Returns how many turns were answered."""
    counts = []
    async with asyncio.TaskGroup() as group:
        users = [group.create_task(_user(stubs, number, counts)) for number in range(_USERS)]
        users.append(group.create_task(_careless(stubs)))
        users += [group.create_task(each) for each in (_chatting(stubs[0]), _watching(stubs[0]))]
        await asyncio.sleep(seconds / 2)
        kill_a_rank()
        await asyncio.sleep(seconds / 2)
        for user in users:
            user.cancel()
    return len(counts)


async def _user(stubs, number, counts):
    rng = random.Random(number)
    system = _tokens(random.Random(number % 2), 96)  # two products share the cluster
    tenant = ("acme", "labs")[number % 2]
    conversation = 0
    while True:
        conversation += 1
        ids = [*system, *_tokens(rng, rng.randrange(20, 200))]
        for turn in range(_TURNS):
            request = ids_request(ids, _OUTPUT_TOKENS, conversation_id=f"u{number}-{conversation}")
            request.tenant = tenant
            # Now and then a question has to be asked again.
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = []
                async for response in stubs[turn % len(stubs)].Generate(request, timeout=60):
                    answer.extend(response.token_ids)
                counts.append(turn)
                if rng.random() < 0.1:
                    answer[-4:] = _tokens(rng, 4)  # its text came back, encoded otherwise
                ids = [*ids, *answer, *_tokens(rng, rng.randrange(10, 60))]
            await asyncio.sleep(rng.uniform(0.1, 0.8))


async def _careless(stubs):
    rng = random.Random("careless")
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stubs[0].Generate(ids_request([10**6])).read()
        call = stubs[0].Generate(ids_request(_tokens(rng, 600), 200))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        call.cancel()
        await asyncio.sleep(2)


async def _chatting(stub):
    """An assistant whose past answers go back by their names, and which may choose its words from a few."""
    for number in itertools.count():
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=_OUTPUT_TOKENS)
        sampling.constraint.choice.texts.extend(["yes, by all means", f"no, not before {number}"])
        chat = generation_pb2.Chat()
        for _ in range(_TURNS):
            chat.messages.add(role="user", content="And then?")
            request = generation_pb2.GenerateRequest(chat=chat, sampling=sampling, model="assistant")
            text, answer_id = "", ""
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in stub.Generate(request, timeout=60):
                    text, answer_id = text + response.text, response.finish.answer_id or answer_id
            chat.messages.add(role="assistant", content=text, answer_id=answer_id)
            await asyncio.sleep(0.5)


async def _watching(stub):
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in stub.WatchCluster(generation_pb2.WatchClusterRequest(all_tenants=True)):
            pass


def _tokens(rng, count):
    return [rng.choice(_VOCABULARY) for _ in range(count)]


def kill(pid):
    os.kill(pid, signal.SIGKILL)
