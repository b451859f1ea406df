"""When a decode rank's own SGLang is gone, its prefill rank is not blamed: routers leave alone who is."""

import asyncio
from contextlib import aclosing

import pytest

from engine.sglang.stand_in import OWN, PAGE_BYTES, chunk, worker_on
from services.engine.sglang.service.sglang_engines import SglangDecodeEngine
from services.values.errors import PeerFailed, Unavailable
from services.values.rank import Generation, RankAddress, RankId
from services.values.request import GenerationRequest, PrefillResult, SamplingParams

PREFILL = RankAddress(RankId("p", 0, Generation(2)), "127.0.0.1:9")
ABORTED = {"type": "abort", "status_code": 500, "message": "KVTransferError"}


class Leg:
    """A prefill leg that comes to a good end, or to this one."""

    peer = PREFILL

    def __init__(self, end=None):
        self.end = end

    async def __call__(self, request, rendezvous):
        if self.end is not None:
            await self.end()
        return PrefillResult(5, None, 0, 3, kv_bytes_moved=PAGE_BYTES)


async def outputs_of(worker, leg):
    request = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=9, temperature=0))
    async with aclosing(SglangDecodeEngine(worker, OWN).generate(request, leg)) as outputs:
        async for output in outputs:
            yield output


async def failure_of(worker, leg):
    tokens = []
    with pytest.raises((PeerFailed, Unavailable)) as failed:
        async for output in outputs_of(worker, leg):
            tokens += output.token_ids
    return failed.type, tokens


async def break_off(answer):
    answer.break_off()


async def break_off_in_the_middle(answer):
    answer.write(chunk())
    answer.break_off()


async def give_up_in_the_middle(answer):
    answer.write(chunk())
    answer.write(chunk(ABORTED, ()))


async def test_an_sglang_that_breaks_off_is_its_own_ranks_fault(subtests, checkpoint):
    for generate, tokens in [
        (None, []),
        (break_off, []),
        (break_off_in_the_middle, [5]),
        (give_up_in_the_middle, [5]),
    ]:
        with subtests.test(generate=generate, tokens=tokens):
            async with worker_on(generate, checkpoint) as worker:
                error, received = await failure_of(worker, Leg())
            assert (error, received) == (Unavailable, tokens)


async def test_prefill_that_loses_its_stream_to_a_dead_decode_is_not_to_blame(subtests, checkpoint):
    for end in ["broken", "ended"]:
        with subtests.test(end=end):

            async def wait(answer):
                await asyncio.Event().wait()

            async with worker_on(wait, checkpoint) as worker:

                async def lost(end=end, worker=worker):
                    (worker._broken if end == "broken" else worker._process.ended).set()
                    raise PeerFailed("the handshake stream was lost")

                assert await failure_of(worker, Leg(lost)) == (Unavailable, [])
                with pytest.raises(Unavailable, match="SGLang has ended"):
                    async for _ in worker.stream({}):
                        pass


async def test_a_worker_that_stops_ends_what_sglang_does_not(checkpoint):
    asked = asyncio.Event()

    async def wait(answer):
        asked.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(30), worker_on(wait, checkpoint) as worker:
        failing = asyncio.create_task(failure_of(worker, Leg()))
        await asked.wait()
        await worker._stop()
        assert await failing == (Unavailable, [])


async def test_a_transfer_that_failed_is_prefills_fault(checkpoint):
    async def give_up(answer):
        answer.write(chunk(ABORTED, ()))

    async with worker_on(give_up, checkpoint) as worker:
        assert await failure_of(worker, Leg()) == (PeerFailed, [])
