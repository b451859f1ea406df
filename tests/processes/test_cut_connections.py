"""Connections between processes that are cut or fall silent, and are healed later."""

import asyncio

import pytest

from processes.harness import ProcessCluster, prompt_of, until

PREFILL = ["prefill-0/0", "prefill-1/0"]
DECODE = ["decode-0/0", "decode-1/0"]
# Room for all streams beside as many pages in quarantine.
SHAPE = dict(kv_pages=2048, prefill_workers=2, decode_workers=2, decode_dp_size=1, behind_proxies=True)
# Pages in quarantine come back by the writer's word on a new stream, or not in the time of a test.
FLAGS = ("--write-lease-s=300",)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_cut_connection_costs_a_move(tmp_path, model_dir):
    async with ProcessCluster(tmp_path, model_dir, rank_flags=FLAGS, **SHAPE) as cluster:
        await cluster.play(
            a_cut_attach_hands_the_streams_over,
            a_cut_handshake_sends_its_requests_to_the_other_prefill_rank,
        )
        assert not cluster.events("kv_fence_time_over")


# Slow: a silent Attach is given up after 5 s, a silent Handshake after 30 s.
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_silent_connection_costs_a_move(tmp_path, model_dir):
    async with ProcessCluster(tmp_path, model_dir, rank_flags=FLAGS, **SHAPE) as cluster:
        await cluster.play(
            a_silent_attach_hands_the_streams_over,
            a_silent_handshake_sends_its_requests_to_the_other_prefill_rank,
        )
        assert not cluster.events("kv_fence_time_over")


async def a_cut_attach_hands_the_streams_over(cluster):
    await lose_attach(cluster, "cut", 10)


async def a_silent_attach_hands_the_streams_over(cluster):
    await lose_attach(cluster, "stall", 20)


async def a_cut_handshake_sends_its_requests_to_the_other_prefill_rank(cluster):
    await lose_handshake(cluster, "cut", 40)


async def a_silent_handshake_sends_its_requests_to_the_other_prefill_rank(cluster):
    await lose_handshake(cluster, "stall", 60)


async def lose_attach(cluster, how, number):
    moved = len(cluster.events("request_moved"))
    streams = [cluster.open(prompt_of(number + i), 150) for i in range(6)]
    for stream in streams:
        await stream.has(3)
    victim = cluster.rank((await cluster.running(DECODE))[0])
    (other,) = {*DECODE} - {victim.name}
    getattr(cluster.proxies[victim.name], how)("Decode")
    for stream in streams:
        await stream.exact()
    left = [line.fields["left"] for line in cluster.events("request_moved")[moved:]]
    assert {*left} == {victim.name}
    newcomers = await asyncio.gather(*(cluster.generate(prompt_of(number + 6 + i)) for i in range(3)))
    assert {name(f.placement.decode) for f in newcomers} == {other}
    await heal(cluster, victim)


async def lose_handshake(cluster, how, number):
    moved = len(cluster.events("request_moved"))
    streams = [cluster.open(prompt_of(number + i, 600)) for i in range(6)]
    victim = cluster.rank((await until(lambda: cluster.running(PREFILL), "a prefill rank computes"))[0])
    (other,) = {*PREFILL} - {victim.name}
    getattr(cluster.proxies[victim.name], how)("Handshake")
    for stream in streams:
        await stream.exact()
    left = [line.fields["left"] for line in cluster.events("request_moved")[moved:]]
    assert {*left} == {victim.name}
    newcomers = await asyncio.gather(*(cluster.generate(prompt_of(number + 6 + i)) for i in range(3)))
    assert {name(f.placement.prefill) for f in newcomers} == {other}
    await heal(cluster, victim)


async def heal(cluster, victim):
    cluster.proxies[victim.name].heal()
    await cluster.until_whole()
    assert cluster.rank(victim.name) == victim  # it lives on, as the same
    await cluster.until_used(victim.name, await cluster.generation(victim.name))


def name(rank):
    return f"{rank.worker}/{rank.rank}"
