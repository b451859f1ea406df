"""Two workers of each role and two routers: one cluster for all, as starting it takes longest."""

import asyncio
import signal

import grpc
import pytest

from cluster.harness import BLOCK
from processes.harness import ProcessCluster, prompt_of, until
from services.engine.fake import continuation

PREFILL = ["prefill-0/0", "prefill-1/0"]
DECODE = ["decode-0/0", "decode-1/0"]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_what_one_leaves_behind_the_other_takes_over(tmp_path, model_dir):
    shape = dict(routers=2, prefill_workers=2, decode_workers=2, decode_dp_size=1)
    async with ProcessCluster(tmp_path, model_dir, **shape) as cluster:
        await cluster.play(
            a_cold_document_is_computed_once_for_both_routers,
            a_killed_prefill_rank_costs_a_retry,
            a_killed_decode_rank_hands_its_streams_over,
            a_decode_rank_killed_while_prefill_writes_frees_prefill,
            a_decode_worker_told_to_stop_finishes_what_it_runs,
            a_prefill_worker_told_to_stop_finishes_what_it_computes,
            a_killed_router_leaves_nothing_behind,
        )


async def a_cold_document_is_computed_once_for_both_routers(cluster):
    await asyncio.gather(*(cluster.generate(prompt_of(500 + i, 90), router=i % 2) for i in range(8)))
    document, other = prompt_of(400, 1_600), prompt_of(401, 1_600)
    beside = asyncio.create_task(cluster.generate(other, router=0))
    await until(lambda: cluster.running(PREFILL), "a prefill rank computes")
    first = asyncio.create_task(cluster.generate([*document, 0, 7], router=0))

    async def expected():
        candidates = (await cluster.explain([*document, 1, 7], router=1)).candidates
        return any(each.prefill_hit_tokens >= len(document) - BLOCK for each in candidates)

    await until(expected, "the other router expects what was sent")
    later = (cluster.generate([*document, number, 7], router=number % 2) for number in range(1, 6))
    _, *finishes = await asyncio.gather(beside, first, *later)
    home = finishes[0].placement.prefill.worker
    elsewhere = [finish for finish in finishes if finish.placement.prefill.worker != home]
    assert all(finish.usage.pulled_tokens >= len(document) - BLOCK for finish in elsewhere)
    assert len(document) <= sum(finish.usage.computed_tokens for finish in finishes) < 1.1 * len(document)


async def one_running(cluster, names):
    """The rank that runs something, once there is one."""
    return (await until(lambda: cluster.running(names), f"one of {names} runs something"))[0]


async def a_killed_prefill_rank_costs_a_retry(cluster):
    generations = {name: await cluster.generation(name) for name in PREFILL}
    streams = [cluster.open(prompt_of(i, 600)) for i in range(6)]
    victim = cluster.rank(await one_running(cluster, PREFILL))
    cluster.signal_rank(victim.name, signal.SIGKILL)
    for stream in streams:
        await stream.exact()
    moved = cluster.events("request_moved")
    assert moved and {line.fields["left"] for line in moved} == {victim.name}
    after = await cluster.restarted(victim)
    assert after.endpoint == victim.endpoint
    new = await cluster.generation(victim.name)
    assert new != generations[victim.name]
    await cluster.until_used(victim.name, new)


async def a_killed_decode_rank_hands_its_streams_over(cluster):
    streams = [cluster.open(prompt_of(20 + i), 80) for i in range(6)]
    for stream in streams:
        await stream.has(3)
    victim = cluster.rank(await one_running(cluster, DECODE))
    moved = len(cluster.events("request_moved"))
    cluster.signal_rank(victim.name, signal.SIGKILL)
    for stream in streams:
        await stream.exact()
    assert len(cluster.events("request_moved")) > moved
    after = await cluster.restarted(victim)
    assert after.endpoint == victim.endpoint
    await cluster.until_used(victim.name, await cluster.generation(victim.name))


async def a_decode_rank_killed_while_prefill_writes_frees_prefill(cluster):
    streams = [cluster.open(prompt_of(30 + i, 1200)) for i in range(4)]
    await until(lambda: cluster.running(PREFILL), "a prefill rank computes")
    victim = cluster.rank(await one_running(cluster, DECODE))
    cluster.signal_rank(victim.name, signal.SIGKILL)
    for stream in streams:
        await stream.exact()
    await cluster.assert_nothing_held(PREFILL)  # before anybody is there again
    await cluster.restarted(victim)


async def a_decode_worker_told_to_stop_finishes_what_it_runs(cluster):
    moved = cluster.events("request_moved")
    stream = cluster.open(prompt_of(50), 150)
    await stream.has(1)
    rank = await one_running(cluster, DECODE)
    (other,) = {*DECODE} - {rank}
    before, worker = cluster.rank(rank), cluster.local.children[rank.split("/")[0]]
    worker.process.send_signal(signal.SIGTERM)
    await until_draining(cluster, rank)
    assert stream.finish is None
    newcomers = [await cluster.generate(prompt_of(51 + i)) for i in range(3)]
    assert {f"{f.placement.decode.worker}/0" for f in newcomers} == {other}
    assert f"{(await stream.exact()).placement.decode.worker}/0" == rank
    assert await worker.process.wait() == 0
    assert cluster.events("request_moved") == moved
    await start_again(cluster, worker, before)


async def a_prefill_worker_told_to_stop_finishes_what_it_computes(cluster):
    moved = cluster.events("request_moved")
    stream = cluster.open(prompt_of(54, 800))
    rank = await one_running(cluster, PREFILL)
    before, worker = cluster.rank(rank), cluster.local.children[rank.split("/")[0]]
    worker.process.send_signal(signal.SIGTERM)
    await until_draining(cluster, rank)
    assert f"{(await stream.exact()).placement.prefill.worker}/0" == rank
    assert await worker.process.wait() == 0
    assert cluster.events("request_moved") == moved
    await start_again(cluster, worker, before)


async def until_draining(cluster, rank):
    """The routers have heard."""

    async def heard():
        explained = [await cluster.explain(prompt_of(70), router) for router in range(2)]
        return all(
            any(rank in (name(c.decode), name(c.prefill)) and "draining" in c.excluded for c in e.candidates)
            for e in explained
        )

    await until(heard, f"the routers know that {rank} is draining")


def name(rank):
    return f"{rank.worker}/{rank.rank}"


async def start_again(cluster, worker, before):
    await cluster.local.start_child(worker.name, worker.command[2], worker.command[3:])
    await cluster.restarted(before)


async def a_killed_router_leaves_nothing_behind(cluster):
    ids = prompt_of(60, 41)
    first = await cluster.generate(ids, router=1, conversation_id="c")
    ids = [*ids, *continuation(ids, 8), 9]

    async def pinned():
        candidates = (await cluster.explain(ids, router=0, conversation_id="c")).candidates
        return any(c.pinned and c.decode == first.placement.decode for c in candidates)

    await until(pinned, "the other router knows the conversation's home")
    streams = [cluster.open(prompt_of(61 + i), 400, router=1) for i in range(4)]
    streams += [cluster.open(prompt_of(65 + i, 400), 400, router=1) for i in range(4)]
    for stream in streams[:4]:
        await stream.has(2)
    assert await cluster.running(DECODE)
    router = cluster.local.children["router-1"]
    router.process.kill()
    for stream in streams:
        error = await stream.ended()
        assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
    await cluster.assert_nothing_held()

    async def would_go_home(ids, router):
        """It has heard of the pin, and that the ranks have nothing to do any more."""
        return (await cluster.explain(ids, router=router, conversation_id="c")).reason == "pinned"

    await until(lambda: would_go_home(ids, 0), "the router left over sends the conversation home")
    second = await cluster.generate(ids, router=0, conversation_id="c")
    assert second.placement.decode == first.placement.decode
    assert second.usage.decode_prefix_len == 48
    await cluster.local.start_child(router.name, router.command[2], router.command[3:])
    await cluster.until_whole()
    ids = [*ids, *continuation(ids, 8), 9]
    await until(lambda: would_go_home(ids, 1), "the new router sends the conversation home")
    third = await cluster.generate(ids, router=1, conversation_id="c")
    assert third.placement.decode == first.placement.decode
