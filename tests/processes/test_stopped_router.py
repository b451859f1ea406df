"""A router that is stopped under load, without a word to anybody, and wakes when it is known to be lost."""

import signal

import grpc
import pytest

from processes.harness import ProcessCluster, prompt_of, until

# Slow: a rank knows of a stopped router by gRPC's keepalive alone (10 s + 20 s).
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = ["decode/0", "prefill/0"]
FREED_WITHIN_S = 120.0  # the answers take 200 s at least


async def test_what_a_stopped_router_asked_for_is_given_up_by_the_ranks(tmp_path, model_dir):
    async with ProcessCluster(
        tmp_path, model_dir, rank_flags=("--fake-step-s=0.5",), routers=2, decode_dp_size=1
    ) as cluster:
        streams = [cluster.open(prompt_of(i), 400) for i in range(4)]
        for stream in streams:
            await stream.has(1)
        router = cluster.local.children["router-0"].process
        router.send_signal(signal.SIGSTOP)
        try:
            await cluster.generate(prompt_of(10), 4, router=1)  # beside them
            assert await cluster.running(RANKS) == ["decode/0"]

            async def freed():
                return not await cluster.running(RANKS)

            await until(freed, "what the router asked for is given up", FREED_WITHIN_S)
            assert (await cluster.books("decode/0"))["private"] == 0
            for stream in streams:
                error = await stream.ended()
                assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            router.send_signal(signal.SIGCONT)
        await cluster.until_whole()
        await cluster.generate(prompt_of(11), 4, router=0)
        await cluster.assert_nothing_held()
