"""The price of a placement by its terms, and who goes before whom."""

from dataclasses import replace

import pytest

from router.placement.placement_ranks import (
    LOCAL,
    NO_SLACK,
    REMOTE,
    WEIGHTS,
    choose,
    decode,
    prefill,
    request,
    terms_of,
)
from services.values.errors import Unavailable
from services.values.rank import Plan, RankKey

# -- the terms ------------------------------------------------------------------------------------


def test_terms_of_a_remote_placement():
    busy = decode(
        0, hit_tokens=1_000, pending_tokens=500, running=4, free_tokens=1_000, evictable_tokens=9_999
    )
    peer = prefill(
        0, hit_tokens=2_000, pending_tokens=3_000, free_tokens=500, evictable_tokens=9_999, queued=2
    )
    decision = choose(request(plans=REMOTE), [busy], [peer])
    assert terms_of(decision) == {
        "wait_prefill": 0.3,
        "compute": 0.3,  # moving 3000 tokens takes longer than computing 2000
        "last_chunk": 0.1,
        "overhead": 0.005,
        "occupy": 2 * 0.2,  # two wait even where the wait is shortest
        "overtake": 0.0,
        "evict_prefill": 0.5 * 1_500 / 10_000,
        "wait_decode": 0.05 * 0.1,
        "wait_room": 0.0,
        "evict_decode": 0.5 * 2_000 / 10_000,
        "itl": 0.05 * 4 * 0.02,
        "outgrow": 0.0,
    }


def test_who_is_overtaken_waits_and_slows_the_answer(subtests):
    """A prompt of 1,000 tokens to compute goes before three that have 20,000 together."""
    passing = dict(hit_tokens=3_000, passed_tokens=20_000, passed_prompts=3)
    with subtests.test("they wait while it is computed; at the decode rank its tokens come late beside them"):
        decision = choose(request(plans=LOCAL), [decode(0, running=4, **passing)])
        terms = dict(decision.chosen.terms)
        assert terms["wait_decode"] == 0.0 and terms["overtake"] == pytest.approx(3 * 0.2)
        assert terms["itl"] == pytest.approx(0.05 * (4 * 0.2 + 20_000 / 5_000))
    with subtests.test("a prefill rank's are overtaken alone, and a decode rank's slow it alone"):
        ranks = [decode(0, passed_tokens=20_000, passed_prompts=3)], [prefill(0, **passing)]
        terms = dict(choose(request(plans=REMOTE), *ranks).chosen.terms)
        assert terms["wait_prefill"] == 0.0 and terms["overtake"] == pytest.approx(3 * 0.1)
        assert terms["wait_decode"] == pytest.approx(0.05 * 20_000 / 5_000)


def test_a_copy_costs_those_that_come_while_it_is_computed():
    """An idle rank would compute the prompt in 0.8 s, and the holder is free in 1.2 s."""
    ranks = [decode(0, hit_tokens=4_000, pending_tokens=6_000), decode(1)]
    asked = request(plans=LOCAL)
    assert choose(asked, ranks).chosen.decode.id.rank == 1
    busier = replace(asked, decode_requests_per_s=5.0)
    decision = choose(busier, ranks)
    assert decision.chosen.decode.id.rank == 0
    (idle,) = [priced for priced in decision.ranked if priced.decode.id.rank == 1]
    assert dict(idle.terms)["occupy"] == pytest.approx(0.5 * 5.0 * 0.8 * 0.8 / 2)


def test_waits_for_what_one_rank_holds_pay_for_a_copy(subtests):
    ranks = [
        decode(0, hit_tokens=3_000, pending_tokens=2_000),
        decode(1),
        decode(2, prefill_tokens_per_s=2e3),
    ]
    asked = request(plans=LOCAL, paid_tokens=3_000)
    for paid_s, chosen, occupy_s in [(0.0, 0, 0.0), (0.3, 1, -0.3), (9.0, 1, -0.6)]:
        with subtests.test("no more is paid than what the copy costs", paid_s=paid_s):
            decision = choose(replace(asked, paid_s=paid_s), ranks, weights=NO_SLACK)
            assert decision.chosen.decode.id.rank == chosen
            assert dict(decision.chosen.terms)["occupy"] == pytest.approx(occupy_s)
    with subtests.test("at the holder a request waits longer than elsewhere, by 2,000 tokens"):
        assert choose(asked, ranks, weights=NO_SLACK).excess_wait_s == pytest.approx(0.4)


def test_terms_of_a_local_placement():
    busy = decode(0, hit_tokens=3_000, pending_tokens=500, running=4, queued=1)
    idle = decode(1)
    decision = choose(request(plans=LOCAL), [busy, idle])
    assert terms_of(decision) == {
        "wait_decode": 0.1,
        "compute": 0.2,
        "occupy": 0.0,  # another rank is idle
        "overtake": 0.0,
        "wait_room": 0.0,
        "evict_decode": 0.0,
        "itl": 0.05 * 4 * 0.2,
        "outgrow": 0.0,
    }
    assert decision.chosen.prefill is None


def test_terms_at_the_edges_of_a_pool_and_of_a_prompt(subtests):
    with subtests.test("a rank whose pages are all in use is priced by the wait for them"):
        crowded = decode(0, running=10, free_tokens=1_000, evictable_tokens=1_000)
        terms = dict(choose(request(plans=REMOTE), [crowded], [prefill(0)]).chosen.terms)
        assert terms["wait_room"] == pytest.approx(2_000 * 0.02 / 10)
        assert terms["evict_decode"] == pytest.approx(0.5 * 1_000 / 10_000)
    with subtests.test("the last token is computed even if all is cached"):
        everywhere = request(plans=LOCAL)
        terms = dict(choose(everywhere, [decode(0, hit_tokens=4_096)]).chosen.terms)
        assert terms["compute"] == pytest.approx(1 / 5_000)
        terms = dict(choose(request(plans=REMOTE), [decode(0)], [prefill(0, hit_tokens=4_096)]).chosen.terms)
        assert terms["compute"] == pytest.approx(0.4)  # the transfer


def test_a_prefill_rank_that_is_free_wins_when_the_transfer_hides_its_computation():
    # Each of the others looks cheaper as long as nobody asks what the transfer takes.
    waiting = [prefill(i, hit_tokens=3_900, pending_tokens=3_000) for i in range(1, 20)]
    decision = choose(request(plans=REMOTE), [decode(0)], [prefill(0), *waiting])
    assert decision.chosen.prefill == prefill(0)


def test_pairs_are_priced_with_their_own_link():
    def links(sender: RankKey, receiver: RankKey) -> float:
        return 1e10 if (sender.rank, receiver.rank) == (2, 3) else 1e9

    ranks = [decode(i) for i in range(5)], [prefill(i) for i in range(5)]
    chosen = choose(request(plans=REMOTE), *ranks, bandwidth=links).chosen
    assert (chosen.prefill.id.rank, chosen.decode.id.rank) == (2, 3)


# -- plans ----------------------------------------------------------------------------------------


def test_the_plan_by_its_tail(subtests):
    with subtests.test("a short tail is computed where its prefix is"):
        home = decode(0, hit_tokens=3_968)
        assert choose(request(), [home, decode(1)], [prefill(0)]).chosen.plan is Plan.LOCAL
    with subtests.test("a long tail would stall the running sequences"):
        assert choose(request(), [decode(0, running=16)], [prefill(0)]).chosen.plan is Plan.REMOTE


# -- home -----------------------------------------------------------------------------------------


def test_a_home_wins_while_its_price_is_near(subtests):
    with subtests.test("the pin decides between near equals"):
        ranks = [decode(0, pending_tokens=100), decode(1), decode(2, hit_tokens=64)]
        decision = choose(request(pinned=RankKey("decode", 0), plans=REMOTE), ranks, [prefill(0)])
        assert (decision.chosen.decode, decision.reason) == (ranks[0], "pinned")
    with subtests.test("the longest prefix is the home without a pin"):
        asked = request(plans=REMOTE)
        for hit_tokens, expected in (
            (asked.prompt_tokens // 2, (0, "longest_prefix")),
            (64, (1, "cheapest")),
        ):
            ranks = [decode(0, hit_tokens=hit_tokens, pending_tokens=500), decode(1)]
            decision = choose(asked, ranks, [prefill(0)])
            assert (decision.chosen.decode.id.rank, decision.reason) == expected
    with subtests.test("a pin to a crowded rank does not hold"):
        ranks = [decode(0, hit_tokens=3_968, pending_tokens=50_000), decode(1)]
        decision = choose(request(pinned=RankKey("decode", 0)), ranks, [prefill(0)])
        assert (decision.chosen.decode, decision.reason) == (ranks[1], "cheapest")
    with subtests.test("a pin counts by what it would leave behind"):
        # 80 ms more than elsewhere: too much for a rank that has evicted what it had.
        for hit_tokens, reason in ((0, "cheapest"), (2_000, "pinned")):
            pinned = decode(0, hit_tokens=hit_tokens, pending_tokens=400 + hit_tokens)
            decision = choose(request(pinned=pinned.id.key), [pinned, decode(1)])
            assert decision.reason == reason, hit_tokens
    with subtests.test("a home that holds half of the prompt is worth a part of the wait too"):
        home, other = decode(0, hit_tokens=2_000, pending_tokens=24_000), decode(1, pending_tokens=20_000)
        assert choose(request(), [home, other]).reason == "longest_prefix"
        assert choose(request(pinned=home.id.key), [home, other]).reason == "pinned"
        assert choose(request(4_001, pinned=home.id.key), [home, other]).reason == "cheapest"
    with subtests.test("a pin without its prefix loses to a long one"):
        ranks = [decode(0), decode(1, hit_tokens=3_968)]
        decision = choose(request(pinned=RankKey("decode", 0)), ranks, [prefill(0)])
        assert (decision.chosen.decode, decision.reason) == (ranks[1], "cheapest")


def test_a_home_behind_many_cheaper_ranks_is_still_compared(subtests):
    for plans in [REMOTE, LOCAL]:
        with subtests.test(plans=plans):
            ranks = [decode(i, pending_tokens=i) for i in range(50)]
            decision = choose(request(pinned=RankKey("decode", 49), plans=plans), ranks, [prefill(0)])
            assert (decision.chosen.decode, decision.reason) == (ranks[49], "pinned")
            assert decision.ranked[0].decode == ranks[0]
            assert decision.ranked[-1] == decision.chosen


def test_a_pin_is_void(subtests):
    with subtests.test("a pin never overrules an excluded rank"):
        ranks = [decode(0, hit_tokens=3_968, excluded="failed"), decode(1)]
        decision = choose(request(pinned=RankKey("decode", 0)), ranks, [prefill(0)])
        assert decision.chosen.decode == ranks[1]
        assert decision.excluded == (ranks[0],)
    with subtests.test("a pin is void while others wait for pages there"):
        crowded = {"hit_tokens": 3_968, "free_tokens": 64, "evictable_tokens": 64}
        asked = request(pinned=RankKey("decode", 0), plans=REMOTE)
        roomy = decode(1, free_tokens=10_000)
        for waiting, reason in ((128, "pinned"), (129, "cheapest")):
            home = decode(0, waiting_tokens=waiting, **crowded)
            weights = replace(WEIGHTS, slack_s=1_000.0)
            decision = choose(asked, [home, roomy], [prefill(0)], weights=weights)
            assert decision.reason == reason
    with subtests.test("a pin to a rank that has gone is no pin"):
        decision = choose(request(pinned=RankKey("decode", 9)), [decode(0)], [prefill(0)])
        assert decision.reason == "cheapest"


# -- ties -----------------------------------------------------------------------------------------


def test_a_tie_goes_round_those_that_are_equal(subtests):
    with subtests.test("equal ranks are split by the tie"):
        ranks = [decode(i) for i in range(40)], [prefill(i) for i in range(4)]
        decisions = [choose(request(plans=REMOTE), *ranks, tie=i / 800) for i in range(800)]
        assert {decision.reason for decision in decisions} == {"tie"}
        pairs = [(decision.chosen.decode.id.rank, decision.chosen.prefill.id.rank) for decision in decisions]
        assert {pair[1] for pair in pairs if pair[0] == 7} == {0, 1, 2, 3}
        counts = [sum(pair[0] == rank for pair in pairs) for rank in range(40)]
        assert min(counts) > 10
        assert max(counts) < 40
    with subtests.test("the tie does not couple decode and prefill ranks"):
        ranks = [decode(i) for i in range(20)], [prefill(i) for i in range(20)]
        chosen = [choose(request(plans=REMOTE), *ranks, tie=i / 400).chosen for i in range(400)]
        assert len({priced.prefill.id.rank for priced in chosen if priced.decode.id.rank == 7}) > 7
    with subtests.test("the same tie gives the same choice"):
        ranks = [decode(i) for i in range(40)], [prefill(i) for i in range(40)]
        assert choose(request(), *ranks, tie=0.618) == choose(request(), *ranks, tie=0.618)
    with subtests.test("a rank that is worse gets no share of the tie"):
        ranks = [decode(0, pending_tokens=1), *(decode(i) for i in range(1, 4))]
        chosen = {choose(request(), ranks, [prefill(0)], tie=i / 50).chosen.decode.id.rank for i in range(50)}
        assert chosen == {1, 2, 3}
    with subtests.test("of equally cheap ranks the least crowded is taken"):
        decodes = [decode(i, running=1 + (i != 2), token_s=0.0) for i in range(8)]
        prefills = [prefill(i, queued=1 + (i != 5), pending_tokens=100) for i in range(8)]
        for i in range(50):
            chosen = choose(request(plans=REMOTE), decodes, prefills, tie=i / 50).chosen
            assert (chosen.decode.id.rank, chosen.prefill.id.rank) == (2, 5)


def test_of_near_equals_the_home_goes_first_and_then_this_routers_share(subtests):
    with subtests.test("of near equals one of this routers share is taken"):
        foreign, own = decode(0, own=False), decode(1, pending_tokens=300)
        decision = choose(request(), [foreign, own])
        assert (decision.chosen.decode.id.rank, decision.reason) == (1, "share")
        decision = choose(request(), [foreign, own._replace(pending_tokens=3_000)])
        assert (decision.chosen.decode.id.rank, decision.reason) == (0, "cheapest")
        # What computes the prompt is what others may have sent to.
        senders = [prefill(0, own=False), prefill(1, pending_tokens=300)]
        decision = choose(request(plans=REMOTE), [decode(0, own=False), decode(1, running=1)], senders)
        chosen = decision.chosen
        assert (chosen.prefill.id.rank, chosen.decode.id.rank, decision.reason) == (1, 0, "share")
    with subtests.test("the home goes before this routers share"):
        home, own = decode(0, own=False, hit_tokens=3_000, pending_tokens=2_900), decode(1)
        assert choose(request(), [home, own]).reason == "longest_prefix"


# -- nowhere --------------------------------------------------------------------------------------


def test_where_nobody_can_be_chosen_it_says_why(subtests):
    with subtests.test("no rank"):
        with pytest.raises(Unavailable, match="there is no decode rank"):
            choose(request(), [], [prefill(0)])
        with pytest.raises(Unavailable, match="there is no prefill rank"):
            choose(request(plans=REMOTE), [decode(0)])
    with subtests.test("all excluded says why"):
        ranks = [decode(0, excluded="draining"), decode(1, excluded="failed"), decode(2, excluded="failed")]
        with pytest.raises(Unavailable, match="no decode rank can take the request: 1 draining, 2 failed"):
            choose(request(), ranks, [prefill(0)])
        with pytest.raises(Unavailable, match="no prefill rank can take the request: 1 suspect"):
            choose(request(plans=REMOTE), [decode(0)], [prefill(0, excluded="suspect")])


def test_without_a_prefill_rank_the_decode_rank_computes():
    decision = choose(request(), [decode(0)], [prefill(0, excluded="failed")])
    assert decision.chosen.plan is Plan.LOCAL


def test_a_request_that_cannot_be_priced_is_refused(subtests):
    for changes in [{"prompt_tokens": 0}, {"chunk_tokens": 0}, {"plans": frozenset()}]:
        with subtests.test(changes=changes), pytest.raises(ValueError, match="needed to place"):
            replace(request(), **changes)
