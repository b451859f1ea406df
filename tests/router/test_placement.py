"""The price of a placement, and the search, against every pair priced by the book."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.errors import NoCapacity, Unavailable
from services.kv.types import Generation, Plan, RankId, RankKey
from services.router.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement import Decision, place
from services.router.price import Weights

BANDWIDTH = 1e9
WEIGHTS = Weights()
NO_SLACK = replace(WEIGHTS, slack_ratio=0.0, slack_s=0.0)
REMOTE, LOCAL = frozenset({Plan.REMOTE}), frozenset({Plan.LOCAL})


def decode(index: int, **changes) -> DecodeCandidate:
    idle = DecodeCandidate(
        id=RankId("decode", index, Generation(index)),
        hit_tokens=0,
        pending_tokens=0,
        prefill_tokens_per_s=5_000.0,
        running=0,
        step_s=0.02,
        free_tokens=1_000_000,
        evictable_tokens=0,
    )
    return replace(idle, **changes)


def prefill(index: int, **changes) -> PrefillCandidate:
    return replace(PrefillCandidate(RankId("prefill", index, Generation(index)), 0, 0, 10_000.0), **changes)


def request(prompt_tokens: int = 4_000, **changes) -> PlacementRequest:
    return replace(PlacementRequest(prompt_tokens, kv_bytes_per_token=1e5, chunk_tokens=1_000), **changes)


def uniform(sender: RankKey, receiver: RankKey) -> float:
    assert (sender.worker, receiver.worker) == ("prefill", "decode")
    return BANDWIDTH


def choose(asked, decodes, prefills=(), *, weights=WEIGHTS, tie=0.0, bandwidth=uniform) -> Decision:
    return place(asked, decodes, prefills, bandwidth, weights, tie)


def terms_of(decision: Decision) -> dict[str, float]:
    return pytest.approx(dict(decision.chosen.terms))


# -- the oracle: the formulas again, one pair at a time -------------------------------------------


def occupy(weights, ranks) -> float:
    waits = [(rank.pending_tokens / rank.prefill_tokens_per_s, rank.queued) for rank in ranks]
    return weights.occupy_weight * min(20, min(waits)[1])


def book_price(asked, weights, d, p, able) -> float:
    decodes, prefills = able
    peers = prefills or decodes
    evict_s = weights.evict_weight * len(peers) / sum(peer.prefill_tokens_per_s for peer in peers)
    delta = max(0, asked.prompt_tokens - d.hit_tokens)
    lacking = max(0, delta - d.free_tokens)
    wait = d.pending_tokens / d.prefill_tokens_per_s
    price = evict_s * min(lacking, d.evictable_tokens)
    price += max(0, lacking - d.evictable_tokens) * d.step_s / max(1, d.running)
    if p is None:
        compute = (asked.prompt_tokens - min(d.hit_tokens, asked.prompt_tokens - 1)) / d.prefill_tokens_per_s
        return price + wait + compute * (1 + occupy(weights, decodes) + weights.itl_weight * d.running)
    uncached = asked.prompt_tokens - min(p.hit_tokens, asked.prompt_tokens - 1)
    compute = uncached / p.prefill_tokens_per_s
    per_token = asked.kv_bytes_per_token / BANDWIDTH
    price += p.pending_tokens / p.prefill_tokens_per_s + occupy(weights, prefills) * compute
    price += max(compute, delta * per_token) + min(asked.chunk_tokens, delta) * per_token
    missing = max(0, asked.prompt_tokens - p.hit_tokens - p.free_tokens)
    price += evict_s * min(missing, p.evictable_tokens)
    price += weights.itl_weight * (wait + (d.step_s if d.running > 0 else 0))
    return price + weights.remote_overhead_s


def able_ranks(asked, decodes, prefills) -> tuple[list[DecodeCandidate], list[PrefillCandidate]]:
    """Those that may be chosen and, where both roles have such, have somebody to be paired with."""
    decodes, prefills = ([rank for rank in ranks if not rank.excluded] for ranks in (decodes, prefills))
    heard = {rank.handshake_version for rank in decodes if rank.receives}
    spoken = {rank.handshake_version for rank in prefills}
    if not heard or not spoken:
        return decodes, prefills
    if Plan.LOCAL not in asked.plans:
        decodes = [rank for rank in decodes if rank.handshake_version in spoken]
    return decodes, [rank for rank in prefills if rank.handshake_version in heard]


def every_way(asked, decodes, prefills) -> list:
    """And how long one would wait."""
    pairs = [(d, p) for d in decodes for p in prefills if Plan.REMOTE in asked.plans and d.receives]
    pairs = [(d, p) for d, p in pairs if d.handshake_version == p.handshake_version]
    ways = [(d, p, d.queue_wait_s + p.compute_wait_s) for d, p in pairs]
    return ways + [
        (d, None, max(d.queue_wait_s, d.compute_wait_s)) for d in decodes if Plan.LOCAL in asked.plans
    ]


def in_time(asked, ranks, ways) -> list:
    """Without those at which one would wait too long either way."""
    waits = {rank.id: [wait for d, p, wait in ways if rank in (d, p)] for rank in ranks}
    return [rank for rank in ranks if not waits[rank.id] or min(waits[rank.id]) <= asked.max_wait_s]


def every_price(asked, weights, able, ways) -> dict:
    return {
        (d.id, p and p.id): book_price(asked, weights, d, p, able)
        for d, p, wait in ways
        if wait <= asked.max_wait_s
    }


def book_home(asked, decodes) -> DecodeCandidate | None:
    for d in decodes:
        if d.id.key == asked.pinned:
            return d
    longest = sorted(decodes, key=lambda d: d.hit_tokens)[-2:]
    tied = len(longest) == 2 and longest[0].hit_tokens == longest[1].hit_tokens
    if 2 * longest[-1].hit_tokens < asked.prompt_tokens or tied:
        return None
    return longest[-1]


def expected_price(prices, asked, home, own, weights) -> float:
    """The home's, else this router's share's, else the best; `own` are the ids of that share."""
    best = min(prices.values())
    short = home is not None and 2 * home.hit_tokens < asked.prompt_tokens
    held_s = home.hit_tokens / home.prefill_tokens_per_s if short else best
    at_home = [price for (decode_id, _), price in prices.items() if home and decode_id == home.id]
    in_share = [
        price for (decode_id, prefill_id), price in prices.items() if (prefill_id or decode_id) in own
    ]
    for preferred, at_most_s in ((at_home, held_s), (in_share, best)):
        if not preferred:
            continue
        price = min(preferred)
        limit = best + weights.slack_ratio * min(best, at_most_s) + weights.slack_s
        assume(abs(price - limit) > 1e-9)  # else the last bit of a sum decides
        if price - best < 1e-9 or price <= limit:
            return price
    return best


tokens = st.sampled_from([0, 0, 64, 640, 2_000, 4_000]) | st.integers(0, 10_000)
waits = st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.5, 4.0])
rates = st.sampled_from([5_000.0, 10_000.0]) | st.floats(500.0, 50_000.0)
queues = st.sampled_from([0, 1, 1, 2, 30])
RECEIVES = st.sampled_from([True, True, True, False])
EXCLUDED = st.sampled_from(["", "", "", "draining", "failed"])


@st.composite
def decode_ranks(draw) -> list[DecodeCandidate]:
    states = st.tuples(
        *(tokens, tokens, rates, st.integers(0, 8), st.sampled_from([0.0, 0.01, 0.05])),
        *(tokens, tokens, EXCLUDED, queues),
    )
    drawn = draw(st.lists(states, min_size=1, max_size=25))
    ranks = [DecodeCandidate(RankId("decode", i, Generation(i)), *state) for i, state in enumerate(drawn)]
    waiting = [
        replace(rank, queue_wait_s=draw(waits), compute_wait_s=draw(waits), receives=draw(RECEIVES))
        for rank in ranks
    ]
    return shared_out(draw, draw(st.sampled_from([ranks, waiting])))


@st.composite
def prefill_ranks(draw) -> list[PrefillCandidate]:
    states = st.tuples(tokens, tokens, rates, tokens, tokens, EXCLUDED, queues)
    drawn = draw(st.lists(states, max_size=25))
    ranks = [PrefillCandidate(RankId("prefill", i, Generation(i)), *state) for i, state in enumerate(drawn)]
    waiting = [replace(rank, compute_wait_s=draw(waits)) for rank in ranks]
    return shared_out(draw, draw(st.sampled_from([ranks, waiting])))


def shared_out(draw, ranks) -> list:
    share, routers = draw(st.sampled_from([(0, 1), (0, 2), (1, 3), (7, 8)]))
    versions = draw(st.sampled_from([(1,), (1,), (1,), (2,), (1, 2), (1, 2, 2, 3)]))
    return [
        replace(rank, own=index % routers == share, handshake_version=versions[index % len(versions)])
        for index, rank in enumerate(ranks)
    ]


@st.composite
def requests(draw) -> PlacementRequest:
    return PlacementRequest(
        prompt_tokens=draw(st.integers(1, 12_000)),
        kv_bytes_per_token=draw(st.sampled_from([1e3, 1e5, 1e6])),
        chunk_tokens=draw(st.sampled_from([256, 2_048])),
        pinned=draw(st.none() | st.builds(RankKey, st.just("decode"), st.integers(0, 30))),
        plans=draw(st.sampled_from([REMOTE, LOCAL, REMOTE | LOCAL])),
        max_wait_s=draw(st.sampled_from([inf, inf, 0.5, 1.0, 3.0])),
    )


@settings(max_examples=200, deadline=None)
@given(
    requests(),
    decode_ranks(),
    prefill_ranks(),
    st.sampled_from([WEIGHTS, NO_SLACK]),
    st.floats(0, 1, exclude_max=True),
)
def test_finds_the_best_of_all_pairs_or_the_home(asked, decodes, prefills, weights, tie):
    if asked.plans == REMOTE:
        decodes = [d if d.receives else replace(d, excluded="another layout") for d in decodes]
    able = able_ranks(asked, decodes, prefills)
    ways = every_way(asked, *able)
    able = tuple(in_time(asked, ranks, ways) for ranks in able)
    prices = every_price(asked, weights, able, ways)
    if not prices:
        with pytest.raises(NoCapacity if ways else Unavailable) as refused:
            choose(asked, decodes, prefills, weights=weights, tie=tie)
        if ways:
            shortest_s = min(wait for _, _, wait in ways)
            assert refused.value.retry_after_s == max(1.0, shortest_s - asked.max_wait_s)
        return
    decision = choose(asked, decodes, prefills, weights=weights, tie=tie)

    chosen, home = decision.chosen, book_home(asked, able[0])
    own = {rank.id for rank in (*decodes, *prefills) if rank.own}
    assert chosen.total_s == pytest.approx(expected_price(prices, asked, home, own, weights))
    for priced in decision.ranked:
        price = prices[priced.decode.id, priced.prefill and priced.prefill.id]
        assert priced.total_s == pytest.approx(price)
        assert (priced.prefill is None) == (priced.plan is Plan.LOCAL)
    totals = [priced.total_s for priced in decision.ranked]
    assert totals == sorted(totals)
    assert totals[0] == pytest.approx(min(prices.values()))
    assert chosen in decision.ranked
    assert {c.id for c in decision.excluded} == {c.id for c in (*decodes, *prefills)} - {
        c.id for side in able for c in side
    }
    at_home = {"pinned": asked.pinned, "longest_prefix": home and home.id.key}
    assert chosen.decode.id.key == at_home.get(decision.reason, chosen.decode.id.key)
    assert decision.reason != "share" or (chosen.prefill or chosen.decode).own


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
        "evict_prefill": 0.5 * 1_500 / 10_000,
        "wait_decode": 0.05 * 0.1,
        "wait_room": 0.0,
        "evict_decode": 0.5 * 2_000 / 10_000,
        "itl": 0.05 * 0.02,
    }


def test_terms_of_a_local_placement():
    busy = decode(0, hit_tokens=3_000, pending_tokens=500, running=4, queued=1)
    idle = decode(1)
    decision = choose(request(plans=LOCAL), [busy, idle])
    assert terms_of(decision) == {
        "wait_decode": 0.1,
        "compute": 0.2,
        "occupy": 0.0,  # another rank is idle
        "wait_room": 0.0,
        "evict_decode": 0.0,
        "itl": 0.05 * 4 * 0.2,
    }
    assert decision.chosen.prefill is None


def test_a_rank_whose_pages_are_all_in_use_is_priced_by_the_wait_for_them():
    crowded = decode(0, running=10, free_tokens=1_000, evictable_tokens=1_000)
    terms = dict(choose(request(plans=REMOTE), [crowded], [prefill(0)]).chosen.terms)
    assert terms["wait_room"] == pytest.approx(2_000 * 0.02 / 10)
    assert terms["evict_decode"] == pytest.approx(0.5 * 1_000 / 10_000)


def test_the_last_token_is_computed_even_if_all_is_cached():
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


def test_a_short_tail_is_computed_where_its_prefix_is():
    home = decode(0, hit_tokens=3_968)
    assert choose(request(), [home, decode(1)], [prefill(0)]).chosen.plan is Plan.LOCAL


def test_a_long_tail_would_stall_the_running_sequences():
    assert choose(request(), [decode(0, running=16)], [prefill(0)]).chosen.plan is Plan.REMOTE


# -- home -----------------------------------------------------------------------------------------


def test_the_pin_decides_between_near_equals():
    ranks = [decode(0, pending_tokens=100), decode(1), decode(2, hit_tokens=64)]
    decision = choose(request(pinned=RankKey("decode", 0), plans=REMOTE), ranks, [prefill(0)])
    assert (decision.chosen.decode, decision.reason) == (ranks[0], "pinned")


def test_the_longest_prefix_is_the_home_without_a_pin():
    asked = request(plans=REMOTE)
    for hit_tokens, expected in ((asked.prompt_tokens // 2, (0, "longest_prefix")), (64, (1, "cheapest"))):
        ranks = [decode(0, hit_tokens=hit_tokens, pending_tokens=500), decode(1)]
        decision = choose(asked, ranks, [prefill(0)])
        assert (decision.chosen.decode.id.rank, decision.reason) == expected


def test_a_pin_to_a_crowded_rank_does_not_hold():
    ranks = [decode(0, hit_tokens=3_968, pending_tokens=50_000), decode(1)]
    decision = choose(request(pinned=RankKey("decode", 0)), ranks, [prefill(0)])
    assert (decision.chosen.decode, decision.reason) == (ranks[1], "cheapest")


def test_a_pin_counts_by_what_it_would_leave_behind():
    """80 ms more than elsewhere: too much for a rank that has evicted what it had."""
    for hit_tokens, reason in ((0, "cheapest"), (2_000, "pinned")):
        pinned = decode(0, hit_tokens=hit_tokens, pending_tokens=400 + hit_tokens)
        decision = choose(request(pinned=pinned.id.key), [pinned, decode(1)])
        assert decision.reason == reason, hit_tokens


def test_a_home_that_holds_half_of_the_prompt_is_worth_a_part_of_the_wait_too():
    home, other = decode(0, hit_tokens=2_000, pending_tokens=24_000), decode(1, pending_tokens=20_000)
    assert choose(request(), [home, other]).reason == "longest_prefix"
    assert choose(request(pinned=home.id.key), [home, other]).reason == "pinned"
    assert choose(request(4_001, pinned=home.id.key), [home, other]).reason == "cheapest"


def test_a_pin_without_its_prefix_loses_to_a_long_one():
    ranks = [decode(0), decode(1, hit_tokens=3_968)]
    decision = choose(request(pinned=RankKey("decode", 0)), ranks, [prefill(0)])
    assert (decision.chosen.decode, decision.reason) == (ranks[1], "cheapest")


@pytest.mark.parametrize("plans", [REMOTE, LOCAL])
def test_a_home_behind_many_cheaper_ranks_is_still_compared(plans):
    ranks = [decode(i, pending_tokens=i) for i in range(50)]
    decision = choose(request(pinned=RankKey("decode", 49), plans=plans), ranks, [prefill(0)])
    assert (decision.chosen.decode, decision.reason) == (ranks[49], "pinned")
    assert decision.ranked[0].decode == ranks[0]
    assert decision.ranked[-1] == decision.chosen


@pytest.mark.parametrize("why", ["failed", "suspect"])
def test_a_pin_never_overrules_an_excluded_rank(why):
    ranks = [decode(0, hit_tokens=3_968, excluded=why), decode(1)]
    decision = choose(request(pinned=RankKey("decode", 0)), ranks, [prefill(0)])
    assert decision.chosen.decode == ranks[1]
    assert decision.excluded == (ranks[0],)


def test_a_pin_is_void_while_others_wait_for_pages_there():
    crowded = {"hit_tokens": 3_968, "free_tokens": 64, "evictable_tokens": 64}
    asked = request(pinned=RankKey("decode", 0), plans=REMOTE)
    roomy = decode(1, free_tokens=10_000)
    for waiting, reason in ((128, "pinned"), (129, "cheapest")):
        home = decode(0, waiting_tokens=waiting, **crowded)
        weights = replace(WEIGHTS, slack_s=1_000.0)
        decision = choose(asked, [home, roomy], [prefill(0)], weights=weights)
        assert decision.reason == reason


def test_a_pin_to_a_rank_that_has_gone_is_no_pin():
    decision = choose(request(pinned=RankKey("decode", 9)), [decode(0)], [prefill(0)])
    assert decision.reason == "cheapest"


# -- ties -----------------------------------------------------------------------------------------


def test_equal_ranks_are_split_by_the_tie():
    ranks = [decode(i) for i in range(40)], [prefill(i) for i in range(4)]
    decisions = [choose(request(plans=REMOTE), *ranks, tie=i / 1_600) for i in range(1_600)]
    assert {decision.reason for decision in decisions} == {"tie"}
    pairs = [(decision.chosen.decode.id.rank, decision.chosen.prefill.id.rank) for decision in decisions]
    assert {pair[1] for pair in pairs if pair[0] == 7} == {0, 1, 2, 3}
    counts = [sum(pair[0] == rank for pair in pairs) for rank in range(40)]
    assert min(counts) > 20
    assert max(counts) < 80


def test_the_tie_does_not_couple_decode_and_prefill_ranks():
    ranks = [decode(i) for i in range(40)], [prefill(i) for i in range(40)]
    chosen = [choose(request(plans=REMOTE), *ranks, tie=i / 1_600).chosen for i in range(1_600)]
    assert len({priced.prefill.id.rank for priced in chosen if priced.decode.id.rank == 7}) > 15


def test_the_same_tie_gives_the_same_choice():
    ranks = [decode(i) for i in range(40)], [prefill(i) for i in range(40)]
    assert choose(request(), *ranks, tie=0.618) == choose(request(), *ranks, tie=0.618)


def test_a_rank_that_is_worse_gets_no_share_of_the_tie():
    ranks = [decode(0, pending_tokens=1), *(decode(i) for i in range(1, 4))]
    chosen = {choose(request(), ranks, [prefill(0)], tie=i / 50).chosen.decode.id.rank for i in range(50)}
    assert chosen == {1, 2, 3}


def test_of_near_equals_one_of_this_routers_share_is_taken():
    foreign, own = decode(0, own=False), decode(1, pending_tokens=300)
    decision = choose(request(), [foreign, own])
    assert (decision.chosen.decode.id.rank, decision.reason) == (1, "share")
    decision = choose(request(), [foreign, replace(own, pending_tokens=3_000)])
    assert (decision.chosen.decode.id.rank, decision.reason) == (0, "cheapest")
    # What computes the prompt is what others may have sent to.
    senders = [prefill(0, own=False), prefill(1, pending_tokens=300)]
    decision = choose(request(plans=REMOTE), [decode(0, own=False), decode(1, running=1)], senders)
    chosen = decision.chosen
    assert (chosen.prefill.id.rank, chosen.decode.id.rank, decision.reason) == (1, 0, "share")


def test_the_home_goes_before_this_routers_share():
    home, own = decode(0, own=False, hit_tokens=3_000, pending_tokens=2_900), decode(1)
    assert choose(request(), [home, own]).reason == "longest_prefix"


def test_of_equally_cheap_ranks_the_least_crowded_is_taken():
    decodes = [decode(i, running=1 + (i != 2), step_s=0.0) for i in range(8)]
    prefills = [prefill(i, queued=1 + (i != 5), pending_tokens=100) for i in range(8)]
    for i in range(50):
        chosen = choose(request(plans=REMOTE), decodes, prefills, tie=i / 50).chosen
        assert (chosen.decode.id.rank, chosen.prefill.id.rank) == (2, 5)


# -- nowhere --------------------------------------------------------------------------------------


def test_no_rank():
    with pytest.raises(Unavailable, match="there is no decode rank"):
        choose(request(), [], [prefill(0)])
    with pytest.raises(Unavailable, match="there is no prefill rank"):
        choose(request(plans=REMOTE), [decode(0)])


def test_all_excluded_says_why():
    ranks = [decode(0, excluded="draining"), decode(1, excluded="failed"), decode(2, excluded="failed")]
    with pytest.raises(Unavailable, match="no decode rank can take the request: 1 draining, 2 failed"):
        choose(request(), ranks, [prefill(0)])
    with pytest.raises(Unavailable, match="no prefill rank can take the request: 1 suspect"):
        choose(request(plans=REMOTE), [decode(0)], [prefill(0, excluded="suspect")])


def test_ranks_of_another_handshake_version_are_no_peers():
    old, new = decode(0, hit_tokens=4_000), decode(1, handshake_version=2)
    decision = choose(request(plans=REMOTE), [old, new], [prefill(0, handshake_version=2)])
    assert (decision.chosen.decode, decision.chosen.prefill.id.rank) == (new, 0)
    (left_out,) = decision.excluded
    assert (left_out.id, left_out.excluded) == (old.id, "no prefill rank speaks its handshake version 1")
    assert choose(request(), [old], [prefill(0, handshake_version=2)]).chosen.plan is Plan.LOCAL
    with pytest.raises(Unavailable, match="2 no prefill rank speaks its handshake version 1"):
        choose(request(plans=REMOTE), [old, decode(1)], [prefill(0, handshake_version=2)])


def test_a_wait_counts_only_between_ranks_of_one_handshake_version():
    """An idle prefill rank of one version and an idle decode rank of the other serve nobody together."""
    decodes = [decode(0), decode(1, queue_wait_s=9.0, handshake_version=2)]
    prefills = [prefill(0, compute_wait_s=5.0), prefill(1, handshake_version=2)]
    with pytest.raises(NoCapacity, match=r"would wait 5\.0 s"):
        choose(request(plans=REMOTE, max_wait_s=1.0), decodes, prefills)
    decision = choose(request(plans=REMOTE, max_wait_s=6.0), decodes, prefills)
    assert (decision.chosen.decode, decision.chosen.prefill) == (decodes[0], prefills[0])
    assert [(c.id.rank, c.excluded) for c in decision.excluded] == [(1, "its queue is too long")] * 2


def test_a_decode_rank_that_does_not_receive_is_no_peer_of_its_handshake_version():
    decodes = [decode(0), decode(1, receives=False, handshake_version=2)]
    prefills = [prefill(0), prefill(1, handshake_version=2)]
    decision = choose(request(max_wait_s=1.0), decodes, prefills)
    (left_out,) = decision.excluded
    assert (left_out.id, left_out.excluded) == (
        prefills[1].id,
        "no decode rank speaks its handshake version 2",
    )
    plans = {way.decode.id.rank: way.plan for way in decision.ranked if way.prefill is None}
    assert plans[1] is Plan.LOCAL


def test_without_a_prefill_rank_the_decode_rank_computes():
    decision = choose(request(), [decode(0)], [prefill(0, excluded="failed")])
    assert decision.chosen.plan is Plan.LOCAL


@pytest.mark.parametrize("changes", [{"prompt_tokens": 0}, {"chunk_tokens": 0}, {"plans": frozenset()}])
def test_a_request_that_cannot_be_priced_is_refused(changes):
    with pytest.raises(ValueError, match="needed to place"):
        replace(request(), **changes)
