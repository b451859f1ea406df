"""Ranks change their roles and come back, under the load of others, and lose no request and no cache."""

import asyncio
import signal
import urllib.request

import pytest

from processes.harness import ProcessCluster, prompt_of, until
from services.cli import role
from services.net import channels
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

TURNS = 10
CHANGING = "decode-0/0"


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_ranks_change_their_roles_under_the_load_of_others(tmp_path, model_dir):
    shape = dict(decode_workers=2, decode_dp_size=1, prefill_workers=1, kv_pages=8192)
    flags = dict(rank_flags=("--fake-step-s=0.002",), router_flags=("--plans=remote,local",))
    async with ProcessCluster(tmp_path, model_dir, **shape, **flags) as cluster:
        await cluster.play(
            one_that_becomes_prefill_and_comes_back,
            what_is_refused,
            one_that_is_killed_in_its_second_role,
            one_that_is_stopped_while_it_changes,
        )


async def command(cluster, *arguments):
    router = cluster.local.router_endpoint(0)
    return await asyncio.to_thread(role.run, [*arguments, f"--router={router}"])


async def one_that_becomes_prefill_and_comes_back(cluster):
    await cluster.converse(0, TURNS)
    before, pages = cluster.rank(CHANGING), (await cluster.books(CHANGING))["cached"]
    assert pages > 0
    beside = asyncio.create_task(cluster.converse(TURNS, TURNS))
    running = cluster.open(prompt_of(7, 30), 400)
    assert await command(cluster, CHANGING, "prefill") == 0
    assert await command(cluster, "prefill", "decode", "--force") == 0
    await running.exact()
    await beside
    assert role_of(await cluster.registrations()) == {
        CHANGING: "prefill",
        "decode-1/0": "decode",
        "prefill/0": "decode",
    }
    after = cluster.rank(CHANGING)
    assert (after.pid, after.endpoint, after.metrics_port) == (
        before.pid,
        before.endpoint,
        before.metrics_port,
    )
    page = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{after.metrics_port}/metrics")
    assert b'role="prefill"' in page.read() and (await cluster.books(CHANGING))["cached"] >= pages
    await cluster.until_used(CHANGING, await cluster.generation(CHANGING))
    await cluster.converse(2 * TURNS, TURNS)
    for names in (["prefill", "prefill", "--force"], [CHANGING, "decode", "--force"]):
        beside = asyncio.create_task(cluster.converse(3 * TURNS, TURNS))
        assert await command(cluster, *names) == 0
        await beside
    await cluster.until_whole()
    # It still has the first turns, and the index says so, once it has come to the router.

    async def held():
        explained = [await cluster.explain(prompt_of(number, 400)) for number in range(TURNS)]
        hits = [c.decode_hit_tokens for e in explained for c in e.candidates if c.decode.worker == "decode-0"]
        return sum(hits) >= 400

    await until(held, "the index has what the rank held before")


async def what_is_refused(cluster):
    running = [cluster.open(prompt_of(number, 30), 300) for number in range(4)]
    await asyncio.gather(*(stream.has(1) for stream in running))
    assert await command(cluster, "decode-0", "decode-1", "prefill", "--timeout-s=0") == 1
    assert await command(cluster, "prefill/0", "prefill") == 1
    assert await command(cluster, "prefill/0", "decode") == 1
    await asyncio.gather(*(stream.exact() for stream in running))
    assert set(role_of(await cluster.registrations()).values()) == {"decode", "prefill"}
    await cluster.until_whole()


async def one_that_is_killed_in_its_second_role(cluster):
    """Its supervisor knows its first one alone."""
    assert await command(cluster, CHANGING, "prefill") == 0
    before = cluster.rank(CHANGING)
    beside = asyncio.create_task(cluster.converse(4 * TURNS, TURNS))
    cluster.signal_rank(CHANGING, signal.SIGKILL)
    await beside
    await cluster.restarted(before)
    assert role_of(await cluster.registrations())[CHANGING] == "decode"


async def one_that_is_stopped_while_it_changes(cluster):
    """What it has cached is handed over by its next life, which is no more than that."""
    await cluster.converse(5 * TURNS, TURNS)
    before = cluster.rank(CHANGING)
    handed_over = len(cluster.events("handed_over", CHANGING))
    request = rank_pb2.SetRoleRequest(generation=await cluster.generation(CHANGING), role="prefill")
    async with channels.open_channel(before.endpoint) as channel:
        await rank_pb2_grpc.RankStub(channel).SetRole(request)
    cluster.signal_rank(CHANGING, signal.SIGTERM)
    await cluster.restarted(before)
    (line,) = cluster.events("handed_over", CHANGING)[handed_over:]
    assert int(line.fields["handed_tokens"]) > 0 and line.fields["successors"] == "1"


def role_of(registrations):
    return {name: registration.role.value for name, registration in registrations.items()}
