"""Every way priced by the book: the choice is the best of them, or the home."""

from itertools import pairwise, product
from math import exp, inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.placement.placement_ranks import BANDWIDTH, LOCAL, NO_SLACK, REMOTE, WEIGHTS, choose
from services.router.placement.candidates import (
    DecodeCandidate,
    PlacementRequest,
    PrefillCandidate,
    SourceCandidate,
)
from services.values.errors import NoCapacity, Unavailable
from services.values.rank import Generation, Plan, RankId, RankKey


def occupy(weights, ranks) -> float:
    waits = [(rank.pending_tokens / rank.prefill_tokens_per_s, rank.queued) for rank in ranks]
    return weights.occupy_weight * min(20, min(waits)[1])


def outgrow(asked, weights, d, peers) -> float:
    most = asked.longest_tokens if asked.most_tokens is None else asked.most_tokens
    if most <= d.holds_tokens:
        return 0.0
    likely = exp(-max(0, d.holds_tokens - asked.prompt_tokens) / weights.usual_output_tokens)
    return likely * d.holds_tokens * len(peers) / sum(peer.prefill_tokens_per_s for peer in peers)


def resumed(rank, source) -> int:
    if source is not None:
        return source.tokens
    return rank.hit_tokens if rank.resume_tokens is None else rank.resume_tokens


def book_price(asked, weights, d, p, able) -> float:
    """Whoever computes takes the best of its sources, or none."""
    return min(price_with(asked, weights, d, p, able, source) for source in (None, *(p or d).sources))


def price_with(asked, weights, d, p, able, source) -> float:
    decodes, prefills = able
    peers = prefills or decodes
    evict_s = weights.evict_weight * len(peers) / sum(peer.prefill_tokens_per_s for peer in peers)
    delta = max(0, asked.prompt_tokens - d.hit_tokens)
    lacking = max(0, delta - d.free_tokens)
    wait, passed = d.pending_tokens / d.prefill_tokens_per_s, d.passed_tokens / d.prefill_tokens_per_s
    price = evict_s * min(lacking, d.evictable_tokens) + outgrow(asked, weights, d, peers)
    price += max(0, lacking - d.evictable_tokens) * d.token_s / max(1, d.running)
    if source is not None:
        own_wait = (p or d).pending_tokens / (p or d).prefill_tokens_per_s
        price += max(0, source.pull_s - own_wait) + weights.itl_weight * source.running * source.pull_s
    if p is None:
        uncached = asked.prompt_tokens - min(resumed(d, source), asked.prompt_tokens - 1)
        compute = uncached / d.prefill_tokens_per_s
        price += wait + compute * (1 + occupy(weights, decodes) + weights.itl_weight * d.running)
        return price + d.passed_prompts * compute + weights.itl_weight * passed
    uncached = asked.prompt_tokens - min(resumed(p, source), asked.prompt_tokens - 1)
    compute = uncached / p.prefill_tokens_per_s
    per_token = asked.kv_bytes_per_token / BANDWIDTH
    price += p.pending_tokens / p.prefill_tokens_per_s + occupy(weights, prefills) * compute
    price += max(compute, delta * per_token) + min(asked.chunk_tokens, delta) * per_token
    price += asked.carried_bytes / BANDWIDTH
    missing = max(0, asked.prompt_tokens - p.hit_tokens - p.free_tokens)
    price += evict_s * min(missing, p.evictable_tokens)
    price += weights.itl_weight * (wait + passed + d.running * d.token_s)
    return price + p.passed_prompts * compute + weights.remote_overhead_s


def able_ranks(decodes, prefills) -> tuple[list[DecodeCandidate], list[PrefillCandidate]]:
    return tuple([rank for rank in ranks if not rank.excluded] for ranks in (decodes, prefills))


def every_way(asked, decodes, prefills) -> list:
    """And how long one would wait."""
    pairs = [(d, p) for d in decodes for p in prefills if Plan.REMOTE in asked.plans and d.receives]
    ways = [(d, p, d.queue_wait_s + p.compute_wait_s) for d, p in pairs]
    return ways + [
        (d, None, max(d.queue_wait_s, d.compute_wait_s)) for d in decodes if Plan.LOCAL in asked.plans
    ]


def in_time(asked, ranks, ways) -> list:
    """Without those at which one would wait too long either way."""
    waits = {rank.id: [wait for d, p, wait in ways if rank in (d, p)] for rank in ranks}
    return [rank for rank in ranks if not waits[rank.id] or min(waits[rank.id]) <= asked.max_wait_s]


def holding(asked, ranks) -> list:
    """Without decode ranks that cannot hold all of it, where one can."""
    most = asked.most_tokens
    roomy = [rank for rank in ranks if most is not None and rank.holds_tokens >= most]
    return roomy or ranks


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
POOLS = st.sampled_from([inf, inf, 5_000, 8_000, 20_000])
SOURCES = [
    SourceCandidate(RankId("source", running, Generation(1)), tokens, 0, running, pull_s)
    for tokens, running, pull_s in product((640, 2_000, 4_000), (0, 8), (0.005, 0.1))
]
SOURCES_OF_A_RANK = st.sampled_from([(), *((each,) for each in SOURCES), *pairwise(SOURCES)])
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
        rank._replace(
            queue_wait_s=draw(waits),
            compute_wait_s=draw(waits),
            receives=draw(RECEIVES),
            holds_tokens=draw(POOLS),
        )
        for rank in ranks
    ]
    ranks, waiting = resuming(draw, ranks), resuming(draw, waiting)
    return passing(draw, pulling(draw, shared_out(draw, draw(st.sampled_from([ranks, waiting])))))


@st.composite
def prefill_ranks(draw) -> list[PrefillCandidate]:
    states = st.tuples(tokens, tokens, rates, tokens, tokens, EXCLUDED, queues)
    drawn = draw(st.lists(states, max_size=25))
    ranks = [PrefillCandidate(RankId("prefill", i, Generation(i)), *state) for i, state in enumerate(drawn)]
    waiting = [rank._replace(compute_wait_s=draw(waits)) for rank in ranks]
    ranks, waiting = resuming(draw, ranks), resuming(draw, waiting)
    return passing(draw, pulling(draw, shared_out(draw, draw(st.sampled_from([ranks, waiting])))))


def passing(draw, ranks) -> list:
    """None of them has prompts that the request goes before, or each has up to two."""
    if not draw(st.booleans()):
        return ranks
    passed = st.sampled_from([(0, 0), (700, 1), (9_000, 2)])
    return [
        rank._replace(passed_tokens=tokens, passed_prompts=prompts)
        for rank, (tokens, prompts) in ((rank, draw(passed)) for rank in ranks)
    ]


def pulling(draw, ranks) -> list:
    """None of them has a source, or each has up to two."""
    if not draw(st.booleans()):
        return ranks
    return [rank._replace(sources=draw(SOURCES_OF_A_RANK)) for rank in ranks]


def resuming(draw, ranks) -> list:
    """None of them tells where it can go on, or each does: nowhere, or somewhere in what it holds."""
    shares = draw(st.sampled_from([None, (0.0,), (0.0, 0.5, 1.0)]))
    if shares is None:
        return ranks
    return [
        rank._replace(resume_tokens=int(draw(st.sampled_from(shares)) * rank.hit_tokens)) for rank in ranks
    ]


def shared_out(draw, ranks) -> list:
    share, routers = draw(st.sampled_from([(0, 1), (0, 2), (1, 3), (7, 8)]))
    return [rank._replace(own=index % routers == share) for index, rank in enumerate(ranks)]


@st.composite
def requests(draw) -> PlacementRequest:
    return PlacementRequest(
        prompt_tokens=draw(st.integers(1, 12_000)),
        kv_bytes_per_token=draw(st.sampled_from([1e3, 1e5, 1e6])),
        chunk_tokens=draw(st.sampled_from([256, 2_048])),
        pinned=draw(st.none() | st.builds(RankKey, st.just("decode"), st.integers(0, 30))),
        plans=draw(st.sampled_from([REMOTE, LOCAL, REMOTE | LOCAL])),
        max_wait_s=draw(st.sampled_from([inf, inf, 0.5, 1.0, 3.0])),
        most_tokens=draw(st.none() | st.sampled_from([6_000, 12_000])),
        longest_tokens=draw(st.sampled_from([0, 8_000, 20_000])),
        carried_bytes=draw(st.sampled_from([0, 0, 6.5e7, 1e9])),
    )


@settings(max_examples=100, deadline=None)
@given(
    requests(),
    decode_ranks(),
    prefill_ranks(),
    st.sampled_from([WEIGHTS, NO_SLACK]),
    st.floats(0, 1, exclude_max=True),
)
def test_finds_the_best_of_all_pairs_or_the_home(asked, decodes, prefills, weights, tie):
    if asked.plans == REMOTE:
        decodes = [d if d.receives else d._replace(excluded="another layout") for d in decodes]
    able = able_ranks(decodes, prefills)
    ways = every_way(asked, *able)
    decodes_in_time, prefills_in_time = (in_time(asked, ranks, ways) for ranks in able)
    able = holding(asked, decodes_in_time), prefills_in_time
    ways_there = [way for way in ways if way[0] in able[0]]
    prices = every_price(asked, weights, able, ways_there)
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
        assert priced.source is None or priced.source in (priced.prefill or priced.decode).sources
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
