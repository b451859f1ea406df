"""An abort, at whatever stage and by whom, reaches both ranks and frees everything, quarantine included.

The lease has minutes to go in all of these: what comes back has come back because the writer said so, or
because nobody was to write. How long it took at the slowest stage is told at the end of the run; whether 2 s
are kept is for bench.soak to judge. The deadlines here only end a test that has failed.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request
from cluster.pair_of_ranks import Ranks
from engine.pair import core_of
from services.decode.prefill_leg import PrefillLeg
from services.engine.fake import continuation
from services.engine.paged.admitting import OutputEstimate
from services.engine.paged.sequence import Phase
from services.kv.handshake import TransferState
from services.router.text.prompt import PromptEncoder
from services.transfer.local import _LandedWrite

LONG_S = 30.0  # a deadline for conditions, never waited out
DEADLINES_S = [0.3 * 2**attempt for attempt in range(7)]  # the next one where a stage is not reached in time
MAX_TOKENS = 400


def prompt_of(attempt):
    """13 chunks of 10 ms, no two attempts' with anything in common."""
    return [(i * 7 + 1 + attempt) % 500 for i in range(400)]


@dataclass
class Stage:
    """How a request is known to have come so far; what holds it there is `released` after the abort."""

    reached: Callable[[], bool]
    release: Callable[[], None] = lambda: None
    while_held: Callable[[], object] = lambda: None


async def never(*args):
    await asyncio.get_running_loop().create_future()


def noting(patch, owner, name):
    """Whoever calls `owner.name` waits for ever; returns how many there were."""
    calls = []

    async def note(*args):
        calls.append(args)
        await never()

    patch.setattr(owner, name, note)
    return calls


def standing(patch, engine, steps):
    """From now on the engine makes so many steps, and stands in the next one; returns what lets it go on."""
    runner, made, go_on = core_of(engine).runner, itertools.count(), threading.Event()
    sleep = runner._sleep

    def pause(seconds):
        if next(made) == steps:
            go_on.wait(LONG_S)
        sleep(seconds)

    patch.setattr(runner, "_sleep", pause)
    return go_on.set


async def at_the_router(cluster, ranks, patch):
    calls = noting(patch, PromptEncoder, "encode")
    return Stage(lambda: calls)


async def queued_at_decode(cluster, ranks, patch):
    patch.setattr(core_of(ranks.decode)._slots, "one_more_runs", lambda _: False)
    return Stage(lambda: ranks.decode.load().waiting)


async def connecting_to_prefill(cluster, ranks, patch):
    calls = noting(patch, ranks.decode._links, "link")
    return Stage(lambda: calls)


async def ticket_taken_and_no_call_yet(cluster, ranks, patch):
    noting(patch, PrefillLeg, "__call__")
    return Stage(
        lambda: any(
            transfer.state is TransferState.TICKETED for transfer in ranks.transfers._transfers.values()
        )
    )


async def queued_at_prefill(cluster, ranks, patch):
    patch.setattr(core_of(ranks.prefill)._slots, "one_more_runs", lambda _: False)
    return Stage(lambda: ranks.prefill.load().waiting)


async def between_prefills_chunks(cluster, ranks, patch):
    go_on, before = standing(patch, ranks.prefill, 3), ranks.prefill.sender.bytes_moved_total
    return Stage(lambda: ranks.prefill.sender.bytes_moved_total > before, go_on)


async def in_the_middle_of_a_write(cluster, ranks, patch):
    """No page comes back, and none is lent again, before the write has ended."""
    landed = []
    patch.setattr(_LandedWrite, "poll", lambda write: bool(landed))

    async def pages_are_set_aside():
        held = {"awaited writers", "transfers", "watches"}
        await until(lambda: ranks.left().keys() == held, "only the write is awaited")
        assert ranks.transfers.writes_in_flight
        await until(lambda: ranks.decode.load().books.quarantined, "its pages are in quarantine")

    return Stage(
        lambda: ranks.prefill.sender.writes_in_flight,
        release=lambda: landed.append(True),
        while_held=pages_are_set_aside,
    )


async def decoding(cluster, ranks, patch):
    go_on = standing(patch, ranks.decode, 3)
    return Stage(lambda: any(seq.num_output > 2 for seq in core_of(ranks.decode)._active), go_on)


async def retracted(cluster, ranks, patch):
    """Two grow until the pool has room for one."""
    patch.setattr(OutputEstimate, "more_tokens", lambda estimate, allowed: 0)
    other = asyncio.create_task(cluster.generate([3] * 380, 400, timeout=LONG_S))
    await until(lambda: ranks.decode.load().running, "the other one runs")

    def present():
        load = ranks.decode.load()
        return load.running + load.waiting

    async def gone_before_the_other():
        await until(lambda: present() <= 1, "it waits no more")

    return Stage(
        lambda: any(seq.retractions for seq in core_of(ranks.decode)._gate),
        release=other.cancel,
        while_held=gone_before_the_other,
    )


async def between_chunks_of_plan_local(cluster, ranks, patch):
    go_on = standing(patch, ranks.decode, 3)
    return Stage(
        lambda: any(seq.phase is Phase.COMPUTING and seq.computed for seq in core_of(ranks.decode)._active),
        go_on,
    )


STAGES = {
    at_the_router: {},
    queued_at_decode: {},
    connecting_to_prefill: {},
    ticket_taken_and_no_call_yet: {},
    queued_at_prefill: {},
    between_prefills_chunks: {},
    in_the_middle_of_a_write: {},
    decoding: {},
    retracted: {"kv_pages": 200},
    between_chunks_of_plan_local: {"plans": ("local",)},
}


async def until(condition, what):
    try:
        async with asyncio.timeout(LONG_S):
            while not condition():
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"not within {LONG_S:g} s: {what}") from None


async def a_client_leaves(cluster, call, read):
    call.cancel()


async def the_deadline_passes(cluster, call, read):
    await asyncio.wait([read])
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def the_router_is_lost(cluster, call, read):
    """Its stream to the decode rank breaks, and nothing is said on it any more."""
    (client,) = cluster.routers[0].cluster._connections.clients.values()
    client._task.cancel()
    call.cancel()


async def consume(call):
    async for _ in call:
        pass


async def seconds_until_all_is_back(cluster, patch, stage, abort, attempt):
    """From the abort on, or from when what held the request let go. None: the stage was not reached."""
    ranks = Ranks(cluster)
    held = await stage(cluster, ranks, patch)
    timeout = DEADLINES_S[attempt] if abort is the_deadline_passes else LONG_S
    call = cluster.stubs[0].Generate(ids_request(prompt_of(attempt), MAX_TOKENS), timeout=timeout)
    read = asyncio.create_task(consume(call))
    await until(lambda: held.reached() or read.done(), "the request has come so far")
    reached = not read.done()
    assert reached or abort is the_deadline_passes, await call.code()
    await abort(cluster, call, read)
    await asyncio.wait([read])
    if reached and (check := held.while_held()) is not None:
        await check
    began = time.monotonic()
    held.release()
    await until(lambda: not ranks.left(), "everything is back")
    return time.monotonic() - began if reached else None


@pytest.mark.parametrize("abort", [a_client_leaves, the_deadline_passes, the_router_is_lost])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_everything_comes_back(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, record_property, stage, abort
):
    settings = dict(prefill=(1,), decode=(1,), fake_step_s=0.01, write_lease_s=600.0) | STAGES[stage]
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **settings) as cluster:
        for attempt in range(len(DEADLINES_S)):
            with monkeypatch.context() as patch:
                seconds = await seconds_until_all_is_back(cluster, patch, stage, abort, attempt)
            if seconds is not None:
                break
        assert seconds is not None, "the deadline has come before the stage each time"
        record_property("until_all_is_back_s", seconds)
        await cluster.assert_nothing_held()
        if abort is not the_router_is_lost:
            prompt = prompt_of(attempt)
            tokens, _ = await cluster.generate(prompt)
            assert tokens == continuation(prompt, 8)
