"""Ranks are drained under load, put back and stopped in the middle of it, and lose those that take over."""

import asyncio
import signal
from functools import partial

import grpc
import pytest

from processes.harness import ProcessCluster, prompt_of, until
from services.cli import drain
from services.engine.fake import continuation
from services.net import channels
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

DECODE = ["decode-0/0", "decode-1/0", "decode-2/0"]
TURNS = 60


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_what_is_handed_over_while_others_come_and_go(tmp_path, model_dir):
    shape = dict(decode_workers=3, decode_dp_size=1, prefill_workers=1, kv_pages=16384)
    flags = dict(router_flags=("--plans=local",), rank_flags=("--fake-step-s=0.002",))
    async with ProcessCluster(tmp_path, model_dir, **shape, **flags) as cluster:
        await cluster.play(
            a_drain_under_load,
            a_drain_that_is_undone_in_the_middle,
            a_successor_that_is_killed_in_the_middle,
            a_rank_that_is_stopped,
        )


async def command(cluster, *arguments):
    router = cluster.local.router_endpoint(0)
    return await asyncio.to_thread(drain.run, [*arguments, f"--router={router}"])


async def told(cluster, name):
    """Return how far the rank is with its hand-over."""
    request = rank_pb2.DrainRequest(generation=await cluster.generation(name), wait_s=0, only_wait=True)
    async with channels.open_channel(cluster.rank(name).endpoint) as channel:
        return (await rank_pb2_grpc.RankStub(channel).Drain(request)).hand_over


async def begun(cluster, name):
    """It has handed over something."""

    async def some():
        try:
            return (await told(cluster, name)).handed_tokens
        except grpc.aio.AioRpcError:
            return 0  # The drain has not begun.

    await until(some, f"{name} has handed over something")


async def known(cluster, ids):
    """Tell whether a router has read in the index that a rank in service holds the prompt, but for a page."""
    candidates = (await cluster.explain(ids)).candidates
    return any(not each.excluded and each.decode_hit_tokens > len(ids) - 12 for each in candidates)


async def a_drain_under_load(cluster):
    await cluster.converse(0, TURNS)
    beside = asyncio.create_task(cluster.converse(TURNS, TURNS))
    assert await command(cluster, DECODE[0]) == 0
    hand_over = await told(cluster, DECODE[0])
    assert hand_over.over and hand_over.handed_tokens > 0 and hand_over.successors == 2
    await beside
    assert (await cluster.books(DECODE[0]))["cached"] > 0  # It keeps its copy.
    # The third turns find what was handed over, for all have been pulled: one page at most is lost.
    prompts = [prompt_of(number, 400) for number in range(TURNS)]
    turns = [[*prompt, *continuation(prompt, 8), 1, 2] for prompt in prompts]
    turns = [[*turn, *continuation(turn, 8), 3, 4] for turn in turns]
    for number, turn in enumerate(turns):
        await until(partial(known, cluster, turn), "the router knows who has it")
        finish = await cluster.generate(turn, conversation_id=f"c{number}")
        assert finish.placement.decode.worker != "decode-0"
        assert finish.usage.computed_tokens <= 10
    assert await command(cluster, DECODE[0], "--undo") == 0
    await cluster.until_whole()


async def a_drain_that_is_undone_in_the_middle(cluster):
    draining = asyncio.create_task(command(cluster, DECODE[1]))
    await begun(cluster, DECODE[1])
    assert await command(cluster, DECODE[1], "--undo") == 0
    await draining  # It may have been over by then.
    await cluster.until_whole()
    await cluster.converse(2 * TURNS, TURNS)


async def a_successor_that_is_killed_in_the_middle(cluster):
    victim = cluster.rank(DECODE[2])
    draining = asyncio.create_task(command(cluster, DECODE[1]))
    await begun(cluster, DECODE[1])
    cluster.signal_rank(victim.name, signal.SIGKILL)
    assert await draining == 0
    hand_over = await told(cluster, DECODE[1])
    assert hand_over.over and hand_over.handed_tokens > 0
    assert await command(cluster, DECODE[1], "--undo") == 0
    await cluster.restarted(victim)
    await cluster.converse(3 * TURNS, TURNS)


async def a_rank_that_is_stopped(cluster):
    beside = asyncio.create_task(cluster.converse(4 * TURNS, TURNS))
    await asyncio.sleep(0.3)
    victim = cluster.rank(DECODE[0])
    cluster.signal_rank(victim.name, signal.SIGTERM)
    await beside
    await cluster.restarted(victim)
    (line,) = [line for line in cluster.events("handed_over", DECODE[0]) if line.fields["successors"] == "2"][
        -1:
    ]
    assert int(line.fields["handed_tokens"]) > 0
    await cluster.until_used(victim.name, await cluster.generation(victim.name))
