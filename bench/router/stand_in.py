"""Decode ranks that only answer, all in one process: so that a router is short of CPU before they are.

`python -m bench.router.stand_in --worker=decode` takes the flags of services.decode. They hold and compute
nothing: every --fake-step-s each request has one more token, and a rank tells of a step in one message. With
--fake-step-s=0 they answer at once: what is left is what the way costs.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, suppress

import grpc

from bench.router.sizes import MAX_CONTEXT_TOKENS
from services.decode.decode_service import IDLE_REPORT_S
from services.engine.fake import FakeRunner
from services.etcd.etcd_client import Etcd
from services.host import descriptors
from services.host.ports import host_port
from services.index.joining import Schema
from services.index.keys import ClusterKeys
from services.index.write.membership import Membership
from services.kv.block_hash import SCHEME
from services.net import poller, servers
from services.process import signals
from services.rank.rank_config import RankConfig
from services.settings.flags import load
from services.values.kv import CacheEvents
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.rank_reports import Registration
from services.wire.isthmus.v1 import common_pb2, decode_pb2, decode_pb2_grpc

_TOKEN = 17
_NOTHING_S = 3600.0


class StandIn(decode_pb2_grpc.DecodeServicer):
    """It stands in for one rank."""

    def __init__(self, step_s: float, num_pages: int) -> None:
        self._step_s = step_s
        self._load = common_pb2.RankLoad(
            free_pages=num_pages, total_pages=num_pages, prefill_tokens_per_s=1e5, step_s=step_s
        )

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Command], context: grpc.aio.ServicerContext
    ) -> None:
        session = _Session()
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            while not reading.done():
                if session.is_due(time.monotonic()):
                    await context.write(session.step(self._load))
                await session.wait(self._step_s)
        finally:
            reading.cancel()


class _Session:
    """A session is one router's. `_left` says by request number how many tokens are still to come."""

    def __init__(self) -> None:
        self._come: list[decode_pb2.Start] = []
        self._left: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._told_s = -math.inf
        self._has_come = asyncio.Event()

    async def wait(self, step_s: float) -> None:
        if step_s or self._has_work():
            await asyncio.sleep(step_s)
            return
        self._has_come.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_come.wait(), IDLE_REPORT_S)

    def _has_work(self) -> bool:
        return bool(self._come or self._left)

    def is_due(self, now_s: float) -> bool:
        is_due = self._has_work() or now_s - self._told_s >= IDLE_REPORT_S
        self._told_s = now_s if is_due else self._told_s
        return is_due

    async def read(self, commands: AsyncIterator[decode_pb2.Command]) -> None:
        async for command in commands:
            self._come += [each.start for each in (command, *command.further) if each.HasField("start")]
            self._has_come.set()

    def step(self, load: common_pb2.RankLoad) -> decode_pb2.StepOutputs:
        last = [number for number, left in self._left.items() if left == 1]
        for number in last:
            del self._left[number]
        numbers = list(self._left)
        for number in numbers:
            self._left[number] -= 1
        outputs = [_last(self._names.pop(number)) for number in last]
        outputs += map(self._first, self._come)
        self._come = []
        token_ids = [_TOKEN] * len(numbers)
        return decode_pb2.StepOutputs(
            outputs=outputs, load=load, numbers=numbers, token_ids=token_ids, takes_further=True
        )

    def _first(self, start: decode_pb2.Start) -> decode_pb2.RequestOutput:
        output = decode_pb2.RequestOutput(request_id=start.request_id, token_ids=[_TOKEN])
        num_tokens = len(start.prompt_ids)
        output.admitted.prompt_tokens = output.admitted.computed_tokens = num_tokens
        output.admitted.plan = start.plan
        if start.sampling.max_tokens > 1:
            self._left[start.number] = start.sampling.max_tokens - 1
            self._names[start.number] = start.request_id
        else:
            output.finished = common_pb2.FINISH_REASON_LENGTH
        return output


def _last(request_id: str) -> decode_pb2.RequestOutput:
    length = common_pb2.FINISH_REASON_LENGTH
    return decode_pb2.RequestOutput(request_id=request_id, token_ids=[_TOKEN], finished=length)


async def main(config: RankConfig) -> None:
    stopping = signals.stop_on_signals()
    poller.start()
    async with AsyncExitStack() as stack:
        for index in range(config.dp_size):
            await _open(stack, config, index)
        await stopping.wait()


async def _open(stack: AsyncExitStack, config: RankConfig, index: int) -> None:
    """A rank's server and its place in etcd, until the stack is closed."""
    servicer = StandIn(config.fake_step_s, config.kv_pages or 1)
    server = await servers.open_server(
        host_port(config.host, 0),
        lambda made: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, made),
        [],
    )
    stack.push_async_callback(server.stop)
    address = RankAddress(
        RankId(config.worker, index, Generation(random.getrandbits(64))), host_port(config.host, server.port)
    )
    etcd = await stack.enter_async_context(Etcd(config.etcd_settings(), rng=random.Random()))
    registration = Registration(
        role=Role.DECODE,
        address=address,
        layout=FakeRunner(num_pages=1, page_size=config.page_size).layout,  # the prefill ranks'
        model=config.served_name,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        total_pages=config.kv_pages or 1,
        engine="fake",
    )
    schema = Schema(config.index_block, SCHEME)
    membership = Membership(etcd, ClusterKeys(config.cluster), schema, registration)
    task = asyncio.create_task(membership.run(_no_events()))

    async def leave() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(leave)


async def _no_events() -> AsyncGenerator[CacheEvents, None]:
    await asyncio.sleep(_NOTHING_S)
    yield CacheEvents()


if __name__ == "__main__":
    descriptors.raise_limit()
    asyncio.run(main(load(RankConfig, prog="bench-stand-in")))
