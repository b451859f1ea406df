"""A prefill rank that is stopped in the middle of its writes, and wakes when its pages are another's."""

import signal

import pytest

from processes.harness import KV_PAGES, ProcessCluster, prompt_of, until

# Slow: that a silent process is stopped, and not busy, is known by gRPC's keepalive alone (10 s + 20 s).
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PREFILL = ["prefill-0/0", "prefill-1/0"]
DECODE = "decode/0"
PROMPT = 800  # tokens in 200 pages


async def test_a_stopped_writer_wakes_too_late_to_write(tmp_path, model_dir):
    flags = ("--write-lease-s=2", "--fence-margin-s=0.5", "--fake-step-s=0.05")
    async with ProcessCluster(
        tmp_path, model_dir, rank_flags=flags, prefill_workers=2, decode_dp_size=1
    ) as cluster:
        stream = cluster.open(prompt_of(1, PROMPT))
        victim = cluster.rank((await until(lambda: cluster.running(PREFILL), "prefill computes"))[0])
        (other,) = {*PREFILL} - {victim.name}
        cluster.signal_rank(victim.name, signal.SIGSTOP)
        try:
            await until(lambda: is_silent(cluster, victim.name), "the router sends it nothing more")

            # Its request goes to the other one, while every page that it may write is set aside.
            assert await until(lambda: cluster.quarantined([DECODE]), "pages are set aside") >= PROMPT // 4
            finish = await stream.exact()
            assert f"{finish.placement.prefill.worker}/0" == other
            assert [line.fields["left"] for line in cluster.events("request_moved")] == [victim.name]

            # It cannot be asked, so that nothing but time brings the pages back.
            await until_no_quarantine(cluster)
            assert len(cluster.events("kv_fence_time_over")) == 1

            # Others take them: so many pages that some must be those. Nobody asks the stopped rank.
            taken = [cluster.open(prompt_of(2 + i, PROMPT), 60) for i in range(2)]
            for reader in taken:
                await reader.has(1)
            books = await cluster.books(DECODE)
            assert books["private"] + books["locked"] > KV_PAGES - PROMPT // 4
        finally:
            cluster.signal_rank(victim.name, signal.SIGCONT)
        await cluster.until_whole()
        for reader in taken:
            await reader.exact()
        assert cluster.rank(victim.name) == victim  # it lives on, as the same
        await cluster.until_used(victim.name, await cluster.generation(victim.name))
        await cluster.assert_nothing_held()


async def is_silent(cluster, name):
    candidates = (await cluster.explain(prompt_of(9))).candidates
    return any(f"{c.prefill.worker}/{c.prefill.rank}" == name and c.excluded == "silent" for c in candidates)


async def until_no_quarantine(cluster):
    async def none():
        return await cluster.quarantined([DECODE]) == 0

    await until(none, "the fence is over")
