"""A router that does nothing: what remains of a request's cost in Python with grpc.aio.

    python -m bench.router.peers.bare RANK_HOST:PORT RANK_GENERATION PORT

It reads a request, passes it to one decode rank over one Attach stream, and passes on what comes: no door, no
index, no choice, no text, no metrics, no deadline, no failover.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc

from bench.router.asked import Asked
from bench.router.peers.child import child
from services.host.ports import free_ports
from services.net import channels, servers
from services.wire.isthmus.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

_READY_S = 20.0
_Said = tuple[list[int], bool]  # token ids, and whether it is the end


class Bare(generation_pb2_grpc.GenerationServicer):
    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._numbers = count(1)
        self._commands: asyncio.Queue[decode_pb2.Command] = asyncio.Queue()
        self._running: dict[int, asyncio.Queue[_Said]] = {}

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        number = next(self._numbers)
        said = self._running[number] = asyncio.Queue()
        start = decode_pb2.Start(
            request_id=str(number),
            number=number,
            prompt_ids=request.token_ids.ids,
            sampling=request.sampling,
            plan=common_pb2.PLAN_LOCAL,
            decode_generation=self._generation,
        )
        self._commands.put_nowait(decode_pb2.Command(start=start))
        num_tokens, ended = 0, False
        while not ended:
            ids, ended = await said.get()
            while not said.empty():
                more, ended = said.get_nowait()
                ids = ids + more
            num_tokens += len(ids)
            response = generation_pb2.GenerateResponse(token_ids=ids)
            if ended:
                response.finish.usage.completion_tokens = num_tokens
                del self._running[number]
            await context.write(response)

    async def attach(self, address: str) -> None:
        async with channels.open_channel(address) as channel, asyncio.TaskGroup() as tasks:
            attached = decode_pb2_grpc.DecodeStub(channel).Attach()
            tasks.create_task(self._write(attached))
            async for step in attached:
                for output in step.outputs:
                    self._put(int(output.request_id), list(output.token_ids), output.HasField("finished"))
                for number, token_id in zip(step.numbers, step.token_ids, strict=True):
                    self._put(number, [token_id], False)

    async def _write(self, attached: grpc.aio.StreamStreamCall) -> None:
        while True:
            await attached.write(await self._commands.get())

    def _put(self, number: int, ids: list[int], ended: bool) -> None:
        self._running[number].put_nowait((ids, ended))


@asynccontextmanager
async def bare_router(rank: Asked, log: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Its endpoint and its process; `rank`: as the rank is asked directly."""
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "bench.router.peers.bare", rank.address, str(rank.generation), str(port)]
    endpoint = f"127.0.0.1:{port}"
    async with child(command, log) as process, channels.open_channel(endpoint) as channel:
        await asyncio.wait_for(channel.channel_ready(), _READY_S)
        yield endpoint, process


async def main(rank: str, generation: int, port: int) -> None:
    bare = Bare(generation)
    server = await servers.open_server(
        f"127.0.0.1:{port}",
        lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(bare, server),
        [],
    )
    try:
        await bare.attach(rank)
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
