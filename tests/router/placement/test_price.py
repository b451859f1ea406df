"""The price of each way to the digit, and the shortlists, against the plainest way to say them."""

from itertools import groupby
from math import exp, inf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.placement.placement_ranks import WEIGHTS
from router.placement.test_oracle import decode_ranks, prefill_ranks, requests
from services.router.placement.price import PriceList
from services.router.placement.shortlist import cheapest, front
from services.router.placement.sides import side_of


def bandwidth(sender, receiver) -> float:
    return 1e8 * (1 + sender.rank) + 1e7 * receiver.rank


def remote_s(asked, pricing, d, p) -> float:
    """Sum by sum in the order that has always been; another order would move the last digit."""
    bytes_per_s = bandwidth(p.id.key, d.id.key)
    per_token = asked.kv_bytes_per_token / bytes_per_s
    compute_s = max(1, asked.prompt_tokens - p.reused_tokens) / p.prefill_tokens_per_s
    missing = asked.prompt_tokens - p.hit_tokens - p.free_tokens
    evicted = min(missing, p.evictable_tokens) if missing > 0 else 0
    wait_s = p.pending_tokens / p.prefill_tokens_per_s
    sender_s = wait_s + pricing.occupy * compute_s + evicted * (WEIGHTS.evict_weight / pricing.tokens_per_s)
    delta = max(0, asked.prompt_tokens - d.hit_tokens)
    last_chunk_s = min(delta, asked.chunk_tokens) * per_token
    fixed_s = at_decode_s(asked, pricing, d, delta) + last_chunk_s + asked.carried_bytes / bytes_per_s
    return sender_s + max(compute_s, delta * per_token) + fixed_s + WEIGHTS.remote_overhead_s


def at_decode_s(asked, pricing, d, delta) -> float:
    late_s, room_s, evict_s, itl_s, outgrow_s = at_decode_parts(asked, pricing, d, delta)
    return late_s + room_s + evict_s + itl_s + outgrow_s


def at_decode_parts(asked, pricing, d, delta) -> tuple[float, ...]:
    lacking = delta - d.free_tokens
    room_s = evict_s = 0.0
    if lacking > 0:
        room_s = max(0, lacking - d.evictable_tokens) * d.token_s / max(1, d.running)
        evict_s = min(lacking, d.evictable_tokens) * (WEIGHTS.evict_weight / pricing.tokens_per_s)
    most = asked.longest_tokens if asked.most_tokens is None else asked.most_tokens
    outgrow_s = 0.0
    if d.holds_tokens < most:
        likely = exp(-max(0, d.holds_tokens - asked.prompt_tokens) / WEIGHTS.usual_output_tokens)
        outgrow_s = likely * d.holds_tokens / pricing.tokens_per_s
    late_s = WEIGHTS.itl_weight * (d.pending_tokens / d.prefill_tokens_per_s)
    return late_s, room_s, evict_s, WEIGHTS.itl_weight * d.running * d.token_s, outgrow_s


def local_s(asked, pricing, d) -> float:
    delta = max(0, asked.prompt_tokens - d.hit_tokens)
    compute_s = max(1, asked.prompt_tokens - d.reused_tokens) / d.prefill_tokens_per_s
    _, room_s, evict_s, _, outgrow_s = at_decode_parts(asked, pricing, d, delta)
    itl_s = WEIGHTS.itl_weight * d.running * compute_s
    wait_s, occupy_s = d.pending_tokens / d.prefill_tokens_per_s, pricing.occupy_local * compute_s
    return sum((wait_s, compute_s, occupy_s, room_s, evict_s, itl_s, outgrow_s))


@settings(max_examples=15, deadline=None)
@given(requests(), decode_ranks(), prefill_ranks())
def test_every_way_costs_to_the_digit_what_its_sums_in_order_are(asked, decodes, prefills):
    assume(prefills and not all(each.excluded for each in (*decodes, *prefills)))
    assume(not all(each.excluded for each in decodes) and not all(each.excluded for each in prefills))
    pricing = PriceList(asked, WEIGHTS, bandwidth, side_of(decodes), side_of(prefills))
    assert pricing.local_s().tolist() == [local_s(asked, pricing, each) for each in decodes]
    rows = np.arange(len(decodes)), np.arange(len(prefills))
    links = pricing.bandwidths(rows[0].tolist(), rows[1].tolist())
    prices_s = pricing.remote_s(*rows, links).tolist()
    for d, decode in enumerate(decodes):
        assert sum(pricing.local_terms(d).values()) == pricing.local_s()[d]
        for p, prefill in enumerate(prefills):
            price_s, bytes_per_s = remote_s(asked, pricing, decode, prefill), links[d][p]
            assert prices_s[d][p] == price_s
            assert bytes_per_s == bandwidth(prefill.id.key, decode.id.key)
            assert pricing.with_sender_s(p, bytes_per_s)[d] == price_s
            terms = pricing.remote_terms(d, p, bytes_per_s)
            assert sum(terms.values()) == pytest.approx(price_s)


seconds = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0])
ranks = st.lists(st.tuples(seconds, seconds, seconds, st.integers(0, 3)), min_size=1, max_size=60)
ties = st.floats(0, 1, exclude_max=True)


def gone_round(rows, crowds, tie):
    """The least crowded from the tie on, and then the others."""
    fewest = min(crowds[row] for row in rows)
    least = [row for row in rows if crowds[row] == fewest]
    first = int(tie * len(least))
    others = sorted((row for row in rows if crowds[row] > fewest), key=crowds.__getitem__)
    return [*least[first:], *least[:first], *others]


@given(ranks, ties, st.sampled_from([1, 4, 64]))
def test_the_cheapest_come_in_ascending_order_and_the_crowded_last(states, tie, count):
    prices, closed, _, crowds = zip(*states, strict=True)
    prices = [inf if is_closed == 3.0 else price for price, is_closed in zip(prices, closed, strict=True)]
    expected = []
    for _, rows in groupby(sorted(range(len(prices)), key=prices.__getitem__), prices.__getitem__):
        expected += gone_round(list(rows), crowds, tie)
    lowest = sum(price == min(prices) for price in prices)
    expected = [row for row in expected[: max(count, min(2, lowest))] if prices[row] < inf]
    assert cheapest(np.array(prices), np.array(crowds), tie, count) == expected


@given(ranks, ties, st.booleans())
def test_the_front_is_of_those_that_are_worse_than_nobody_in_all(states, tie, wait_matters):
    fixed, overlapped, waits, crowds = zip(*states, strict=True)
    waits = waits if wait_matters else (0.0,) * len(waits)
    keys = [(a + b, a, wait) for a, b, wait in zip(fixed, overlapped, waits, strict=True)]
    expected = []
    for key, rows in groupby(sorted(range(len(keys)), key=keys.__getitem__), keys.__getitem__):
        if not any(other != key and all(x <= y for x, y in zip(other, key, strict=True)) for other in keys):
            expected += gone_round(list(rows), crowds, tie)[:2]
    columns = (np.array(column) for column in (fixed, overlapped, waits, crowds))
    found = front(*columns, tie) if wait_matters else front(*list(columns)[:2], None, np.array(crowds), tie)
    assert found == expected
