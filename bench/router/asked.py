"""Clients that cost little: they count what comes, and read only the last of it.

    python -m bench.router.asked < ASKED as JSON > TOLD as JSON

A process of its own, so that its time is not the benchmark's. Each stream asks, reads its answer to the end,
and asks again, until the time is over; what has begun is finished.
"""

import asyncio
import json
import random
import resource
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import grpc

from bench.router.sizes import VOCAB_SIZE
from services.net import channels
from services.wire.isthmus.v1 import common_pb2, decode_pb2, decode_pb2_grpc, generation_pb2

_GENERATE = "/isthmus.v1.Generation/Generate"
_KNOWN_SHARE = 0.9  # of a prompt, that was asked before
_TIMEOUT_S = 120.0
_WORDS = ("alpha ", "beta ", "gamma ", "delta ", "for ", "while ", "return ", "self ")


@dataclass(frozen=True, slots=True)
class Asked:
    """`front`: grpc (ids), bare (the same, of a router that does nothing), http (ids as JSON), text (HTTP),
    generate (SGLang's own door, ids), or decode: a decode rank itself, of that life. Several addresses share
    the streams; a conversation's turns come to all."""

    front: str
    address: str  # HOST:PORT, or several with commas
    streams: int
    prompt_tokens: int
    max_tokens: int
    seconds: float
    conversations: int = 16
    seed: int = 0
    generation: int = 0
    client: int = 0  # the number of the address, from 0
    warms: bool = False  # each conversation is asked once, however long that takes: then the ranks hold it

    def by_address(self) -> list["Asked"]:
        addresses = self.address.split(",")
        return [
            replace(
                self,
                address=address,
                client=client,
                streams=len(range(self.streams)[client :: len(addresses)]),
            )
            for client, address in enumerate(addresses)
        ]


@dataclass(slots=True)
class Told:
    """These figures are of answers that ended, times in seconds. `found` are tokens of prompts that decode
    ranks held, where gRPC is asked."""

    requests: int = 0
    found: int = 0
    tokens: int = 0
    messages: int = 0
    took_s: float = 0.0
    cpu_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between two messages of an answer
    errors: list[str] = field(default_factory=list)


class Prompts:
    """Turns of a few conversations, each with a new end."""

    def __init__(self, asked: Asked) -> None:
        self._rng = random.Random(asked.seed)
        num_known = int(_KNOWN_SHARE * asked.prompt_tokens)
        self._known = [self._ids(num_known) for _ in range(asked.conversations)]
        self._num_new = asked.prompt_tokens - num_known
        if asked.client:
            self._rng.seed(f"{asked.seed} {asked.client}")  # the same conversations, other turns
        self._warms, self._num_given = asked.warms, 0

    def goes_on(self, until_s: float) -> bool:
        return self._num_given < len(self._known) if self._warms else time.monotonic() < until_s

    def _ids(self, count: int) -> "array[int]":
        return array("I", self._rng.choices(range(1, VOCAB_SIZE), k=count))

    def next(self) -> tuple[int, "array[int]"]:
        """Return the conversation's number, and the prompt."""
        in_turn = self._num_given % len(self._known)
        self._num_given += 1
        number = in_turn if self._warms else self._rng.randrange(len(self._known))
        return number, self._known[number] + self._ids(self._num_new)


async def run(asked: Asked) -> Told:
    told, began = Told(), time.monotonic()
    ask = {"grpc": _grpc, "bare": _grpc, "decode": _decode}.get(asked.front, _http)
    async with asyncio.timeout(asked.seconds + _TIMEOUT_S), asyncio.TaskGroup() as group:
        for each in asked.by_address():
            group.create_task(ask(each, told, began + asked.seconds))
    told.took_s = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    told.cpu_s = used.ru_utime + used.ru_stime
    return told


async def _grpc(asked: Asked, told: Told, until_s: float) -> None:
    prompts = Prompts(asked)
    async with channels.open_channel(asked.address) as channel:
        call = channel.unary_stream(_GENERATE, request_serializer=None, response_deserializer=None)
        await _streams(asked, prompts, until_s, lambda: _grpc_turn(call, asked, prompts, told))


async def _grpc_turn(call: Any, asked: Asked, prompts: Prompts, told: Told) -> None:
    number, ids = prompts.next()
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=ids),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=asked.max_tokens, ignore_eos=True),
        conversation_id=f"c{asked.seed}-{number}",
    ).SerializeToString()
    began, came_s, last = time.monotonic(), list[float](), b""
    try:
        async for message in call(request, timeout=_TIMEOUT_S):
            last = message
            came_s.append(time.monotonic())
    except grpc.aio.AioRpcError as error:
        told.errors.append(f"{error.code().name}: {error.details()}")
        return
    finish = generation_pb2.GenerateResponse.FromString(last).finish
    told.found += finish.usage.decode_prefix_len
    _note(told, began, came_s, len(came_s), finish.usage.completion_tokens)


async def _decode(asked: Asked, told: Told, until_s: float) -> None:
    """One at a time, as a router asks for them."""
    prompts = Prompts(asked)
    async with channels.open_channel(asked.address) as channel:
        attached = decode_pb2_grpc.DecodeStub(channel).Attach()
        number = 0
        while prompts.goes_on(until_s):
            began, came_s, number = time.monotonic(), list[float](), number + 1
            await attached.write(decode_pb2.Command(start=_start(asked, prompts, f"direct-{number}")))
            while not (output := _output(await attached.read())) or not output.HasField("finished"):
                if output is not None:
                    came_s.append(time.monotonic())
            came_s.append(time.monotonic())
            _note(told, began, came_s, len(came_s), asked.max_tokens)
        await attached.done_writing()


def _start(asked: Asked, prompts: Prompts, request_id: str) -> decode_pb2.Start:
    return decode_pb2.Start(
        request_id=request_id,
        prompt_ids=prompts.next()[1],
        sampling=common_pb2.SamplingParams(
            temperature=0, max_tokens=asked.max_tokens, ignore_eos=True, seed=1
        ),
        plan=common_pb2.PLAN_LOCAL,
        decode_generation=asked.generation,
    )


def _output(step: Any) -> decode_pb2.RequestOutput | None:
    """The last: a rank that is behind tells of several steps in one. None: only the rank's load."""
    if step is grpc.aio.EOF:
        raise RuntimeError("the decode rank has ended the stream")
    outputs: list[decode_pb2.RequestOutput] = list(step.outputs)
    if outputs and outputs[-1].HasField("error"):
        raise RuntimeError(outputs[-1].error.message)
    return outputs[-1] if outputs else None


async def _http(asked: Asked, told: Told, until_s: float) -> None:
    prompts, host_port = Prompts(asked), asked.address.rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def turn() -> None:
        connection = idle.pop() if idle else await asyncio.open_connection(host_port[0], int(host_port[2]))
        if await _http_turn(connection, asked, prompts, told):
            idle.append(connection)
        else:
            connection[1].close()

    await _streams(asked, prompts, until_s, turn)
    for _, writer in idle:
        writer.close()


async def _http_turn(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], asked: Asked, prompts: Prompts, told: Told
) -> bool:
    reader, writer = connection
    path, body = _body(asked, prompts)
    head = f"POST {path} HTTP/1.1\r\nhost: {asked.address}\r\ncontent-type: application/json\r\n"
    began = time.monotonic()
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readuntil(b"\r\n\r\n")
    came_s, events, tail = list[float](), 0, b""
    if b" 200 " not in status.partition(b"\r\n")[0]:
        told.errors.append((status + await reader.read(500)).decode(errors="replace"))
        return False
    while not tail.endswith(b"0\r\n\r\n"):
        piece = await reader.read(1 << 16)
        if not piece:
            told.errors.append("the connection was closed")
            return False
        came_s.append(time.monotonic())
        events += piece.count(b"data:")
        tail = (tail + piece)[-8:]
    _note(told, began, came_s, events - 1, asked.max_tokens)  # [DONE] brings nothing
    return True


def _body(asked: Asked, prompts: Prompts) -> tuple[str, bytes]:
    number, ids = prompts.next()
    if asked.front == "generate":
        sampling = {"temperature": 0, "max_new_tokens": asked.max_tokens, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
        return "/generate", json.dumps(body).encode()
    prompt: object = list(ids)
    if asked.front == "text":
        prompt = "".join(_WORDS[token % len(_WORDS)] for token in ids)
    body = {
        "prompt": prompt,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "conversation_id": f"c{asked.seed}-{number}",
    }
    return "/v1/completions", json.dumps(body).encode()


def _note(told: Told, began: float, came_s: Sequence[float], messages: int, tokens: int) -> None:
    told.requests += 1
    told.tokens += tokens
    told.messages += messages
    told.ttft_s.append(came_s[0] - began)
    told.e2e_s.append(time.monotonic() - began)
    told.gaps_s += [round(after - before, 5) for before, after in pairwise(came_s)]


async def _streams(asked: Asked, prompts: Prompts, until_s: float, turn: Callable[[], Any]) -> None:
    async def stream() -> None:
        while prompts.goes_on(until_s):
            await turn()

    async with asyncio.TaskGroup() as group:
        for _ in range(asked.streams):
            group.create_task(stream())


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(Asked(**json.load(sys.stdin)))))))
