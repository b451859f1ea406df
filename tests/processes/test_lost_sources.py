"""Sources of pulls that drain, are stopped and killed: only the log tells, and every token is right."""

import asyncio
import os
import signal

import pytest

from processes.harness import ProcessCluster, prompt_of, until
from services.engine.fake import continuation
from services.net import channels
from services.values.rank import Plan, PullSource
from services.values.rank_reports import LENDS
from services.values.request import SamplingParams
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import decode_pb2, decode_pb2_grpc, rank_pb2, rank_pb2_grpc

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

PROMPT = 400  # tokens in 100 pages
FLAGS = ("--fake-prompt-token-s=0.001", "--write-lease-s=2", "--fence-margin-s=0.5", "--fake-step-s=0.005")
SOURCE, PULLER = "decode/0", "decode/1"


class Attached:
    """A router's stream to one decode rank, as far as a test needs it."""

    def __init__(self, registration):
        self.address = registration.address
        self._channel = channels.open_channel(registration.address.endpoint)
        self._commands, self._answers = asyncio.Queue(), {}
        call = decode_pb2_grpc.DecodeStub(self._channel).Attach(self._sent())
        self._reader = asyncio.create_task(self._read(call))

    async def _sent(self):
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self, call):
        async for message in call:
            for output in message.outputs:
                self._answers[output.request_id].put_nowait(output)

    async def ask(self, request_id, ids, source=None, max_tokens=6):
        """Its Admitted; the tokens are asserted."""
        self._answers[request_id] = answers = asyncio.Queue()
        start = decode_pb2.Start(
            request_id=request_id,
            prompt_ids=ids,
            sampling=convert_request.sampling_to_proto(SamplingParams(temperature=0, max_tokens=max_tokens)),
            plan=convert.plan_to_proto(Plan.LOCAL),
            decode_generation=self.address.id.generation,
        )
        if source is not None:
            start.pull_from.CopyFrom(convert.source_to_proto(PullSource(source, len(ids))))
        self._commands.put_nowait(decode_pb2.Command(start=start))
        tokens, admitted = [], None
        async with asyncio.timeout(60):
            while True:
                output = await answers.get()
                assert not output.HasField("error"), output.error
                tokens += output.token_ids
                if output.HasField("admitted"):
                    admitted = convert_request.admitted_from_proto(output.admitted)
                if output.HasField("finished"):
                    break
        assert tokens == continuation(ids, max_tokens)
        return admitted

    async def close(self):
        self._commands.put_nowait(None)
        await asyncio.gather(self._reader, return_exceptions=True)  # Its rank may be gone.
        await self._channel.close()


async def warm(ranks, count):
    """The source holds so many prompts."""
    prompts = [[number, *prompt_of(number, PROMPT)] for number in range(count)]
    for number, prompt in enumerate(prompts):
        await ranks[SOURCE].ask(f"warm-{number}", prompt)
    return prompts


async def test_a_source_that_is_lost_costs_time_only(tmp_path, model_dir):
    shape = {"prefill_workers": 1, "decode_dp_size": 2, "kv_pages": 4096}
    async with ProcessCluster(tmp_path, model_dir, rank_flags=FLAGS, **shape) as cluster:
        registrations = await cluster.registrations()
        assert all(LENDS in each.capabilities for each in registrations.values())
        ranks = {name: Attached(registrations[name]) for name in (SOURCE, PULLER)}
        prompts = await warm(ranks, 30)
        source = ranks[SOURCE].address

        # One that drains lends all the same.
        async with channels.open_channel(source.endpoint) as channel:
            stub, life = rank_pb2_grpc.RankStub(channel), source.id.generation
            await stub.Drain(rank_pb2.DrainRequest(generation=life, wait_s=5, hand_over_s=0))
            pulled = (await ranks[PULLER].ask("drained", prompts[0], source)).pulled
            assert pulled.tokens == 400 and not pulled.refused
            await stub.Undrain(rank_pb2.UndrainRequest(generation=life))

        # One that is stopped is late. It wakes when its pages are another's.
        victim = cluster.rank(SOURCE)
        cluster.signal_rank(SOURCE, signal.SIGSTOP)
        try:
            asked = [ranks[PULLER].ask(f"stopped-{i}", prompts[i], source) for i in range(1, 5)]
            told = [admitted.pulled.refused for admitted in await asyncio.gather(*asked)]
            assert set(told) == {"late"}
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        await cluster.assert_nothing_held([SOURCE, PULLER])

        # One is killed while it is asked for many.
        asked = [
            asyncio.create_task(ranks[PULLER].ask(f"killed-{i}", prompts[i], source)) for i in range(5, 30)
        ]
        await until(lambda: any(task.done() for task in asked), "one has been pulled")
        cluster.signal_rank(SOURCE, signal.SIGKILL)
        told = [admitted.pulled for admitted in await asyncio.gather(*asked)]
        print("killed:", sorted(pulled.refused for pulled in told))
        assert any(pulled.tokens for pulled in told) and any(pulled.refused == "gone" for pulled in told)
        assert {pulled.refused for pulled in told} <= {"", "busy", "gone", "late", "failed"}
        await cluster.restarted(victim)
        gone = (await ranks[PULLER].ask("gone", [7, *prompt_of(99, PROMPT)], source)).pulled
        assert gone.refused == "gone"
        await cluster.assert_nothing_held([SOURCE, PULLER])
        for rank in ranks.values():
            await rank.close()
