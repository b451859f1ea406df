"""A rank that is killed and started again finds its tier: memory that its supervisor holds, or a file."""

import signal

import pytest

from processes.harness import ProcessCluster, prompt_of, until

# Long: real processes.
pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

DECODE = "decode/0"
LENGTH = 200


@pytest.mark.parametrize("where", ["memory", "file"])
async def test_the_next_life_of_a_rank_reads_what_the_last_one_stored(where, tmp_path, model_dir):
    place = "memory" if where == "memory" else str(tmp_path / "tier")
    flags = (f"--kv-tier={place}:1MiB", "--fake-step-s=0.001")
    async with ProcessCluster(
        tmp_path / "data",
        model_dir,
        kv_pages=56,
        rank_flags=flags,
        router_flags=("--plans=local",),
        decode_workers=1,
        decode_dp_size=1,
    ) as cluster:
        prompts = [prompt_of(number, LENGTH) for number in range(8)]
        for number, prompt in enumerate(prompts, start=1):
            await cluster.generate(prompt)
            await until(lambda n=number - 1: _stored(cluster, n * LENGTH // 5), "most of it is stored")
        before = cluster.rank(DECODE)
        stored = (await cluster.metrics(DECODE))["isthmus_tier_blocks{held}"]
        cluster.signal_rank(DECODE, signal.SIGKILL)
        await cluster.restarted(before)
        found = int(cluster.events("kv_tiers_found", DECODE)[-1].fields["blocks"])
        assert found >= stored - 1, "at most a block may have been torn"
        reused = [(await cluster.generate(prompt)).usage.decode_prefix_len for prompt in prompts]
        assert max(reused) > LENGTH // 2, reused
        metrics = await cluster.metrics(DECODE)
        assert metrics["isthmus_tier_tokens_total{up}"] > 0
        assert metrics["isthmus_tier_errors_total"] == 0
        await cluster.assert_nothing_held()


async def _stored(cluster, least):
    return (await cluster.metrics(DECODE))["isthmus_tier_blocks{held}"] >= least
