"""These tests show who is let in by what he would wait, and where the ranks that are in time are taken."""

import pytest

from router.cluster.fake_mirror import D0, D0_KEY, D1, D1_KEY, P0, queue, view
from services.values.errors import NoCapacity, Unavailable
from services.values.rank import Plan, Role
from services.values.rank_reports import RankLoad


async def test_who_would_wait_too_long_everywhere_is_refused_and_told_why(two_decodes, clock, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    queue(balance, D0_KEY, 9.0)
    two_decodes.check_room(0.0)  # nobody waits at the other one
    queue(balance, D1_KEY, 7.0)
    two_decodes.check_room(7.0)
    with pytest.raises(NoCapacity, match=r"would wait 7\.0 s") as refused:
        two_decodes.check_room(5.0)
    assert refused.value.retry_after_s == pytest.approx(2.0)
    with pytest.raises(NoCapacity, match=r"would wait 7\.0 s") as refused:
        two_decodes.place(prompt, "", frozenset(), 5.0)
    explained = two_decodes.explain(prompt, "", 5.0).decision
    assert explained.reason == str(refused.value)
    assert [rank.excluded for rank in explained.candidates] == ["its queue is too long"] * 3
    two_decodes.place(prompt, "", frozenset())  # what was begun is never refused


async def test_ranks_with_too_long_a_queue_or_too_short_a_context_are_passed_over(
    two_decodes, mirror, balance
):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    for rank, other in ((D0_KEY, D1_KEY), (D1_KEY, D0_KEY)):
        queue(balance, rank, 9.0)
        queue(balance, other, 1.0)
        placed = two_decodes.place(prompt, "", frozenset(), 5.0)
        assert placed.decision.chosen.decode.id.key == other
        assert [c.excluded for c in placed.decision.excluded] == ["its queue is too long"]
    mirror.set(view(Role.DECODE, 0, max_context_tokens=64))
    prompt = await two_decodes.hash(tuple(range(100)), "")
    queue(balance, D1_KEY, 9.0)
    with pytest.raises(NoCapacity, match=r"would wait 9\.0 s"):
        two_decodes.place(prompt, "", frozenset(), 5.0)


async def test_without_any_rank_it_is_not_the_queues_that_are_too_long(cluster):
    cluster.check_room(0.0)
    with pytest.raises(Unavailable):
        cluster.place(await cluster.hash((1, 2), ""), "", frozenset(), 0.0)


async def test_prompts_that_are_computed_first_are_waited_for_too(two_decodes, clock, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    p0 = P0.registration.id.key
    balance.report(p0, RankLoad(pending_tokens=90_000, prefill_tokens_per_s=10_000.0))
    for decode in (D0_KEY, D1_KEY):
        balance.report(decode, RankLoad(pending_tokens=80_000))
    # Nothing of theirs was measured: what they are believed to need is no ground to refuse anybody.
    assert two_decodes.place(prompt, "", frozenset(), 5.0).plan is Plan.LOCAL
    for decode in (D0_KEY, D1_KEY):
        balance.report(decode, RankLoad(pending_tokens=80_000, prefill_tokens_per_s=10_000.0))
    with pytest.raises(NoCapacity, match=r"would wait 8\.0 s"):
        two_decodes.place(prompt, "", frozenset(), 5.0)
    with pytest.raises(NoCapacity, match=r"would wait 8\.0 s"):
        two_decodes.check_room(5.0)  # before a prompt is tokenized for nothing
    two_decodes.check_room(8.5)
    two_decodes.place(prompt, "", frozenset(), 8.5)


async def test_a_home_with_too_long_a_queue_is_left_and_a_rank_in_time_taken(two_decodes, balance, mirror):
    """By slack it would be chosen: all in all it is hardly worse."""
    prompt = await two_decodes.hash(tuple(range(640)), "")
    mirror.index.apply_snapshot(D1.registration.id, prompt.hashes)
    for rank, wait_s in ((D0_KEY, 3.4), (D1_KEY, 6.4), (P0.registration.id.key, 9.0)):
        load = RankLoad(pending_tokens=int(200 * wait_s), prefill_tokens_per_s=200.0)
        balance.report(rank, load)
    pinned = two_decodes.place(prompt, "", frozenset(), 7.0).decision
    assert (pinned.chosen.decode.id.key, pinned.reason) == (D1_KEY, "longest_prefix")
    moved = two_decodes.place(prompt, "", frozenset(), 6.0).decision
    assert (moved.chosen.decode.id.key, moved.chosen.plan) == (D0_KEY, Plan.LOCAL)
    assert {str(rank.id.key): rank.excluded for rank in moved.excluded} == {
        "decode/1": "its queue is too long",
        "prefill/0": "its queue is too long",
    }
    explained = two_decodes.explain(prompt, "", 6.0).decision
    assert explained.chosen == moved.chosen and explained.excluded == moved.excluded


async def test_an_idle_rank_is_taken_where_the_one_with_the_prefix_has_too_long_a_queue(
    two_decodes, mirror, balance
):
    """Though the prompt takes longer there than one may wait: computing is no waiting."""
    p1 = view(Role.PREFILL, 1)
    mirror.set(p1)
    prompt = await two_decodes.hash(tuple(range(1_200)), "")
    mirror.index.apply_snapshot(P0.registration.id, prompt.hashes)
    mirror.index.apply_snapshot(p1.registration.id, ())
    for rank, pending_tokens in ((P0, 1_040), (p1, 0), (D0, 9_999), (D1, 9_999)):
        load = RankLoad(pending_tokens=pending_tokens, prefill_tokens_per_s=200.0)
        balance.report(rank.registration.id.key, load)
    assert two_decodes.place(prompt, "", frozenset(), 6.0).prefill == P0.registration.address
    assert two_decodes.place(prompt, "", frozenset(), 5.0).prefill == p1.registration.address
