"""One prefill rank, two decode ranks, one router: one cluster for all, as starting it takes longest."""

import asyncio
import signal

import grpc
import pytest

from cluster.harness import BLOCK
from processes.harness import ProcessCluster, prompt_of, until
from services.engine.fake import continuation


@pytest.mark.long
async def test_where_nothing_stands_in_for_what_is_gone(tmp_path, model_dir):
    async with ProcessCluster(tmp_path, model_dir) as cluster:
        await cluster.play(
            a_conversation_moves_only_its_delta,
            without_their_prefill_rank_requests_are_exact_or_unavailable,
            an_outage_of_etcd_goes_unnoticed,
            a_stranger_to_the_clusters_schema_is_refused,
        )


async def a_conversation_moves_only_its_delta(cluster):
    ids, home = prompt_of(1), None
    for turn in range(3):
        finish = await cluster.generate(ids, conversation_id="c")
        usage = finish.usage
        assert usage.prompt_tokens == len(ids) == usage.decode_prefix_len + usage.delta_tokens
        if turn:
            # All that was computed there, up to the newest token and the new question.
            assert usage.decode_prefix_len == (len(ids) - 3) // BLOCK * BLOCK
            assert finish.placement.decode == home
        home = finish.placement.decode
        ids = [*ids, *continuation(ids, 8), 400 + turn, 7]


async def without_their_prefill_rank_requests_are_exact_or_unavailable(cluster):
    before = cluster.rank("prefill/0")
    generation = await cluster.generation(before.name)
    decoding = [cluster.open(prompt_of(i), 60) for i in (10, 11)]
    for stream in decoding:
        await stream.has(1)
    waiting = [cluster.open(prompt_of(i, 400)) for i in range(12, 16)]
    await until(lambda: cluster.running([before.name]), "the prefill rank computes")
    cluster.signal_rank(before.name, signal.SIGKILL)
    await until(lambda: cluster.quarantined(["decode/0", "decode/1"]), "pages are set aside")
    for stream in decoding:  # what prefill has done stays done
        await stream.exact()
    # Up again within a second, the rank is asked once more; it may also take longer, or be lost twice.
    for error in filter(None, [await stream.ended() for stream in waiting]):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "prefill" in error.details(), error.details()
    after = await cluster.restarted(before)
    assert after.endpoint == before.endpoint
    assert await cluster.generation(before.name) != generation
    await cluster.generate(prompt_of(16))
    await cluster.assert_nothing_held()
    # The pages came back because a new life proves that the old one is dead, long before the fence.
    assert not cluster.events("kv_fence_time_over")


async def an_outage_of_etcd_goes_unnoticed(cluster):
    ranks = {name: cluster.rank(name) for name in cluster.rank_names}
    registrations = await cluster.registrations()
    ids = prompt_of(20, 41)
    first = await cluster.generate(ids, conversation_id="outage")
    lost = len(cluster.events("lease_lost"))
    await cluster.local.etcd.kill()
    ids = [*ids, *continuation(ids, 8), 9]
    second = await cluster.generate(ids, conversation_id="outage")
    await until(lambda: len(cluster.events("lease_lost")) >= lost + len(ranks), "every lease has lapsed")
    assert (await cluster.explain(ids, conversation_id="outage")).degraded
    await asyncio.gather(*(cluster.generate(prompt_of(21 + i)) for i in range(4)))
    await cluster.local.etcd.start()

    async def registered():
        return (await cluster.registrations()).keys() == registrations.keys()

    await until(registered, "the ranks have registered again")
    await cluster.until_whole()
    ids = [*ids, *continuation(ids, 8), 9]
    third = await cluster.generate(ids, conversation_id="outage")
    assert first.placement.decode == second.placement.decode == third.placement.decode
    assert second.usage.decode_prefix_len >= 40
    assert third.usage.decode_prefix_len > second.usage.decode_prefix_len
    assert {name: cluster.rank(name) for name in ranks} == ranks  # nobody was restarted
    assert await cluster.registrations() == registrations
    await cluster.assert_nothing_held()
    # And whoever comes new after it finds its way in.
    cluster.signal_rank("prefill/0", signal.SIGKILL)
    await cluster.restarted(ranks["prefill/0"])
    await cluster.until_used("prefill/0", await cluster.generation("prefill/0"))


async def a_stranger_to_the_clusters_schema_is_refused(cluster):
    flags = [*cluster.local.children["decode"].command[3:], "--worker=stranger", "--index-block=8"]
    stranger = await cluster.local.start_child("stranger", "services.decode", flags)
    async with asyncio.timeout(20):
        assert await stranger.process.wait() == 78
        await stranger.log_task
    (sentence,) = {line for line in cluster.other_lines if line.startswith("stranger| ")}
    assert "4 tokens per index block" in sentence and "8 tokens" in sentence
    await cluster.generate(prompt_of(40))
