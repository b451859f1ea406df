"""The price of a pair to the digit, and the shortlist, against the plainest way to say them."""

from itertools import groupby
from math import exp

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.placement.placement_ranks import WEIGHTS
from router.placement.test_oracle import decode_ranks, prefill_ranks, requests
from services.router.placement.decision import least_crowded_first, shortlist
from services.router.placement.price import Option, PriceList


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
    sender_s = wait_s + pricing.occupy * compute_s + evicted * pricing.evict_s_per_token
    sender_s += p.passed_prompts * compute_s
    delta = max(0, asked.prompt_tokens - d.hit_tokens)
    last_chunk_s = min(delta, asked.chunk_tokens) * per_token
    fixed_s = at_decode_s(asked, pricing, d, delta) + last_chunk_s + asked.carried_bytes / bytes_per_s
    return sender_s + max(compute_s, delta * per_token) + fixed_s + WEIGHTS.remote_overhead_s


def at_decode_s(asked, pricing, d, delta) -> float:
    lacking = delta - d.free_tokens
    room_s = evict_s = 0.0
    if lacking > 0:
        room_s = max(0, lacking - d.evictable_tokens) * d.token_s / max(1, d.running)
        evict_s = min(lacking, d.evictable_tokens) * pricing.evict_s_per_token
    most = asked.longest_tokens if asked.most_tokens is None else asked.most_tokens
    outgrow_s = 0.0
    if d.holds_tokens < most:
        likely = exp(-max(0, d.holds_tokens - asked.prompt_tokens) / WEIGHTS.usual_output_tokens)
        outgrow_s = likely * d.holds_tokens / pricing.tokens_per_s
    rate = d.prefill_tokens_per_s
    late_s = WEIGHTS.itl_weight * (d.pending_tokens / rate + d.passed_tokens / rate)
    return late_s + room_s + evict_s + WEIGHTS.itl_weight * d.running * d.token_s + outgrow_s


@settings(max_examples=15, deadline=None)
@given(requests(), decode_ranks(), prefill_ranks())
def test_every_pair_costs_to_the_digit_what_its_sums_in_order_are(asked, decodes, prefills):
    assume(prefills)
    pricing = PriceList(asked, WEIGHTS, bandwidth, decodes, prefills)
    senders, receivers = list(map(pricing.sender, prefills)), list(map(pricing.receiver, decodes))
    for receiver in receivers:
        # Whichever bandwidth the parts are known for already, if it is any's.
        for known in {1.0, *(bandwidth(each.id.key, receiver.decode.id.key) for each in prefills)}:
            options = pricing.remotes(receiver, senders, known, pricing.receiving_s(receiver, known))
            for sender, priced in zip(senders, options, strict=True):
                assert priced.total_s == remote_s(asked, pricing, receiver.decode, sender.prefill)
                assert priced.bytes_per_s == bandwidth(sender.prefill.id.key, receiver.decode.id.key)


@settings(max_examples=15, deadline=None)
@given(requests(), decode_ranks())
def test_under_plan_local_the_price_is_the_sum_of_its_terms(asked, decodes):
    pricing = PriceList(asked, WEIGHTS, bandwidth, decodes, ())
    for receiver in map(pricing.receiver, decodes):
        local_s = pricing.local_s(receiver, receiver.uncached)
        assert local_s == pricing.priced(Option(local_s, receiver.decode, None)).total_s


seconds = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0])
ranks = st.lists(st.tuples(seconds, seconds, seconds, st.integers(0, 3)), min_size=1, max_size=60)


@given(ranks, st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 4, 64]))
def test_the_shortlist_is_the_front_and_the_cheapest_in_ascending_order(states, tie, spare_ranks):
    fixed, overlapped, waits, crowds = map(list, zip(*states, strict=True))
    keys = [(a + b, a, wait) for a, b, wait in zip(fixed, overlapped, waits, strict=True)]
    lowest, front, expected = (min(fixed), min(waits)), [], []
    for (_, own_fixed, wait), group in groupby(
        sorted(range(len(keys)), key=keys.__getitem__), keys.__getitem__
    ):
        of_use = all(own_fixed < other or wait < other_wait for other, other_wait in front)
        front += [(own_fixed, wait)] * of_use
        members = list(group)
        fewest = min(crowds[member] for member in members)
        least = [member for member in members if crowds[member] == fewest]
        first = int(tie * len(least))
        rest = sorted((member for member in members if crowds[member] > fewest), key=crowds.__getitem__)
        expected += [*least[first:], *least[:first], *rest][: max(spare_ranks - len(expected), int(of_use))]
        is_long = len(expected) >= 32 and any(each == lowest[1] for _, each in front)
        if len(expected) >= spare_ranks and (front[-1] == lowest or is_long):
            break
    assert shortlist(fixed, overlapped, waits, crowds, tie, spare_ranks) == expected


def test_one_alone_is_its_own_order():
    assert least_crowded_first([7], {7: 3}.__getitem__, 0.9) == [7]
