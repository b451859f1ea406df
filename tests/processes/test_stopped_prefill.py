"""A prefill rank that is stopped for longer than its write leases, and goes on before it counts as silent."""

import asyncio
import signal

import pytest

from processes.harness import ProcessCluster, prompt_of, until

# Slow: a lease is real time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LEASE_S = 1.0
STOP_S = 2.5
PROMPT = 800  # tokens, of which a part is computed and written when it is stopped


async def test_renewals_that_came_in_time_are_heard_before_their_requests_fail(tmp_path, model_dir):
    flags = (f"--write-lease-s={LEASE_S:g}", "--fake-step-s=0.05")
    async with ProcessCluster(tmp_path, model_dir, rank_flags=flags, decode_dp_size=1) as cluster:
        streams = [cluster.open(prompt_of(i, PROMPT)) for i in range(3)]
        await until(lambda: cluster.running(["prefill/0"]), "prefill computes")
        cluster.signal_rank("prefill/0", signal.SIGSTOP)
        await asyncio.sleep(STOP_S)
        cluster.signal_rank("prefill/0", signal.SIGCONT)
        for stream in streams:
            await stream.exact()
        assert not cluster.events("request_moved")
        await cluster.assert_nothing_held()
