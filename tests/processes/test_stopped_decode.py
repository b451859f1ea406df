"""A decode rank that is stopped under load, and wakes when its streams have ended elsewhere."""

import asyncio
import signal

import pytest

from processes.harness import ProcessCluster, prompt_of

# Slow: routers take a decode rank for lost when they have heard nothing of it for 5 s.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DECODE = ["decode-0/0", "decode-1/0"]


async def test_a_stopped_decode_rank_hands_its_streams_over_and_is_taken_back(tmp_path, model_dir):
    async with ProcessCluster(tmp_path, model_dir, decode_workers=2, decode_dp_size=1) as cluster:
        streams = [cluster.open(prompt_of(i), 250) for i in range(6)]
        for stream in streams:
            await stream.has(3)
        streams += [cluster.open(prompt_of(10 + i, 300)) for i in range(6)]  # their prompts are computed
        victim = cluster.rank((await cluster.running(DECODE))[0])
        (other,) = {*DECODE} - {victim.name}
        cluster.signal_rank(victim.name, signal.SIGSTOP)
        try:
            for stream in streams:
                await stream.exact()
            assert {line.fields["left"] for line in cluster.events("request_moved")} == {victim.name}
            assert cluster.events("decode_rank_lost")
            newcomers = await asyncio.gather(*(cluster.generate(prompt_of(20 + i)) for i in range(4)))
            assert {f"{f.placement.decode.worker}/0" for f in newcomers} == {other}
        finally:
            cluster.signal_rank(victim.name, signal.SIGCONT)
        await cluster.until_whole()
        assert cluster.rank(victim.name) == victim  # it lives on, as the same
        await cluster.until_used(victim.name, await cluster.generation(victim.name))
        await cluster.assert_nothing_held()
