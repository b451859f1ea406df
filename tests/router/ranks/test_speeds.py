"""These tests show how fast ranks compute and links carry, learned from what requests took."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ranks.observed import (
    D0,
    D1,
    MIB,
    P0,
    P1,
    PRIOR_BANDWIDTH,
    PRIOR_RATE,
    Clock,
    known,
    moved,
    pulled,
    took,
)
from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.decision import place
from services.router.placement.price import PriceWeights
from services.router.ranks import learned as speeds_module
from services.router.ranks.balance import Balance
from services.values.kv import BlockHash
from services.values.rank import Generation, Plan, RankId, RankKey
from services.values.rank_reports import RankLoad


def test_what_is_assumed_before_it_was_measured(subtests):
    with subtests.test("before anything was measured the priors hold"):
        _, balance = known()
        assert balance.now(P0).tokens_per_s == PRIOR_RATE
        assert balance.bandwidth(P0, D0) == PRIOR_BANDWIDTH
    with subtests.test("the first measurement replaces the prior for all"):
        _, balance = known()
        balance.observe_admitted(D0, P0, took())
        assert balance.now(P0).tokens_per_s == pytest.approx(4_000)
        assert balance.now(P1).tokens_per_s == pytest.approx(4_000)
    with subtests.test("a rate belongs to the rank that computed"):
        _, balance = known()
        balance.observe_admitted(D0, P0, took())
        balance.observe_admitted(D0, P1, took(prefill_compute_s=1.0))
        balance.observe_admitted(D1, None, took(plan=Plan.LOCAL, prefill_compute_s=4.0))
        assert [balance.now(rank).tokens_per_s for rank in (P0, P1, D1)] == pytest.approx([4_000, 2_000, 500])


def test_a_rate_converges_to_what_requests_take(balance):
    balance.observe_admitted(D0, P0, took(prefill_compute_s=0.01))
    for _ in range(100):
        balance.observe_admitted(D0, P0, took())
    assert balance.now(P0).tokens_per_s == pytest.approx(4_000, rel=0.01)


def test_one_slow_request_moves_a_rate_less_than_one_fast_one(balance):
    for _ in range(50):
        balance.observe_admitted(D0, P0, took())
        balance.observe_admitted(D0, P1, took())
    balance.observe_admitted(D0, P0, took(computed_tokens=1_500))
    balance.observe_admitted(D0, P1, took(computed_tokens=2_500))
    assert 0 < 4_000 - balance.now(P0).tokens_per_s < balance.now(P1).tokens_per_s - 4_000


def test_small_samples(subtests):
    with subtests.test("tiny computations are no measure"):
        _, balance = known()
        balance.observe_admitted(D0, P0, took(computed_tokens=15))
        balance.observe_admitted(D0, P0, took(prefill_compute_s=0.0))
        assert balance.now(P0).tokens_per_s == PRIOR_RATE
    with subtests.test("small computations count for little"):
        _, balance = known()
        balance.observe_admitted(D0, P0, took(computed_tokens=16))
        assert balance.now(P0).tokens_per_s == pytest.approx(32)
        balance.observe_admitted(D0, P0, took())
        assert balance.now(P0).tokens_per_s > 3_500
    with subtests.test("small transfers are no measure"):
        _, balance = known()
        balance.observe_admitted(D0, P0, moved(2e8, size_bytes=MIB - 1))
        assert balance.bandwidth(P0, D0) == PRIOR_BANDWIDTH


def test_what_the_rank_itself_reports_comes_first(balance):
    balance.observe_admitted(D0, None, took(plan=Plan.LOCAL))
    balance.report(D0, RankLoad(prefill_tokens_per_s=7_000.0))
    assert balance.now(D0).tokens_per_s == 7_000
    balance.report(D0, RankLoad(prefill_tokens_per_s=0.0))  # not measured by the rank
    assert balance.now(D0).tokens_per_s == pytest.approx(4_000)


def test_a_new_rank_is_taken_to_be_as_fast_as_the_others_report(balance):
    balance.observe_admitted(D0, None, took(plan=Plan.LOCAL))  # 4,000 a second, by our clock
    balance.report(D0, RankLoad(prefill_tokens_per_s=30_000.0))
    balance.report(P0, RankLoad(prefill_tokens_per_s=50_000.0))
    balance.report(D1, RankLoad())
    assert balance.now(D1).tokens_per_s == pytest.approx(40_000)
    balance.unreported(P0)
    assert balance.now(D1).tokens_per_s == pytest.approx(30_000)
    balance.forget(D0)
    assert balance.now(D1).tokens_per_s == pytest.approx(4_000)


def test_a_wrong_report_is_forgotten_with_its_rank(subtests):
    for wrong in (-1e6, 1e300, 1.7e308):
        with subtests.test(wrong=wrong):
            _, balance = known()
            balance.report(D0, RankLoad(prefill_tokens_per_s=wrong))
            balance.report(P0, RankLoad(prefill_tokens_per_s=wrong))
            balance.report(P0, RankLoad(prefill_tokens_per_s=50_000.0))
            assert 0 < balance.now(D1).tokens_per_s < float("inf")
            balance.forget(D0)
            assert balance.now(D1).tokens_per_s == 50_000


def test_what_is_old_fades(subtests):
    with subtests.test("an old measurement fades towards the usual"):
        clock, balance = known()
        balance.observe_admitted(D0, P0, took(prefill_compute_s=20.0))  # 100 tokens/s: never again?
        for _ in range(100):
            balance.observe_admitted(D0, P1, took())
        assert balance.now(P0).tokens_per_s == pytest.approx(100)
        clock.now += 600
        assert balance.now(P0).tokens_per_s == pytest.approx(4_000, rel=0.01)
    with subtests.test("an old link fades towards the usual"):
        clock, balance = known()
        balance.observe_admitted(D0, P0, moved(1e7))
        for _ in range(50):
            balance.observe_admitted(D0, P1, moved(1e9))
        clock.now += 900
        assert balance.bandwidth(P0, D0) == pytest.approx(1e9, rel=0.01)


@given(bandwidth=st.floats(1e7, 1e11), compute_s=st.floats(0.001, 10.0))
def test_the_bandwidth_learned_is_the_one_placement_would_have_needed(bandwidth, compute_s):
    balance = Balance(Clock(), chunk_tokens=1_000)
    admitted = moved(bandwidth, compute_s)
    balance.observe_admitted(D0, P0, admitted)
    chosen = place(
        PlacementRequest(2_000, admitted.kv_bytes_moved / 2_000, 1_000, plans=frozenset({Plan.REMOTE})),
        [DecodeCandidate(RankId("decode", 0, Generation(1)), 0, 0, 1.0, 0, 0.0, 9_999, 0)],
        [PrefillCandidate(RankId("prefill", 0, Generation(1)), 0, 0, 2_000 / compute_s)],
        balance.bandwidth,
        PriceWeights(remote_overhead_s=0.0, evict_weight=0.0),
        0.0,
    ).chosen
    assert chosen.total_s == pytest.approx(compute_s + max(1e-4, admitted.transfer_s), rel=1e-3)


@given(bandwidth=st.floats(1e7, 1e11), compute_s=st.floats(0.001, 10.0), carried=st.integers(1, 1 << 30))
def test_what_is_carried_beside_the_delta_tells_the_same_bandwidth(bandwidth, compute_s, carried):
    """32 KiB a token, in two chunks; tails and states go with the last one."""
    pages = 64 * MIB
    took_s = max(compute_s, pages / bandwidth) + (pages / 2 + carried) / bandwidth
    transfer_s = took_s - compute_s
    balance = Balance(Clock(), chunk_tokens=1_000)
    admitted = took(kv_bytes_moved=pages + carried, prefill_compute_s=compute_s, transfer_s=transfer_s)
    balance.observe_admitted(D0, P0, replace(admitted, carried_bytes={"recurrent": carried}))
    if transfer_s >= 1e-4:
        assert balance.bandwidth(P0, D0) == pytest.approx(bandwidth, rel=1e-3)


def test_a_link_or_its_rank_or_all(subtests):
    with subtests.test("a drafts pages go with those of the delta"):
        _, balance = known()
        balance.observe_admitted(D0, P0, moved(2e8))
        balance.observe_admitted(D0, P1, replace(moved(2e8), carried_bytes={"draft": 10 * MIB}))
        assert balance.bandwidth(P0, D0) == balance.bandwidth(P1, D0)
    with subtests.test("a link falls back to its prefill rank then to all"):
        _, balance = known()
        balance.observe_admitted(D0, P0, moved(2e8))
        balance.observe_admitted(D0, P1, moved(1e9))
        assert balance.bandwidth(P0, D0) == pytest.approx(2e8)
        assert balance.bandwidth(P0, D1) == pytest.approx(2e8)
        assert 2e8 < balance.bandwidth(RankKey("prefill", 2), D0) < 1e9
    with subtests.test("links of one prefill rank differ"):
        _, balance = known()
        for _ in range(5):
            balance.observe_admitted(D0, P0, moved(2e8))
            balance.observe_admitted(D1, P0, moved(1e9))
        assert balance.bandwidth(P0, D0) == pytest.approx(2e8)
        assert balance.bandwidth(P0, D1) == pytest.approx(1e9)


def test_a_bandwidth_stays_within_what_hardware_does(subtests):
    for transfer_s, expected in [(0.0, 1e12), (1e9, 1e6)]:
        with subtests.test(transfer_s=transfer_s, expected=expected):
            _, balance = known()
            balance.observe_admitted(D0, P0, took(kv_bytes_moved=10**12, transfer_s=transfer_s))
            assert balance.bandwidth(P0, D0) == expected


def test_a_prefill_rank_remembers_so_many_links(balance, monkeypatch):
    monkeypatch.setattr(speeds_module, "_MAX_LINKS", 2)
    for rank, bandwidth in ((D0, 2e8), (D1, 1e9), (D0, 2e8), (RankKey("decode", 2), 1e9)):
        balance.observe_admitted(rank, P0, moved(bandwidth))
    assert balance.bandwidth(P0, D0) == pytest.approx(2e8)
    assert balance.bandwidth(P0, RankKey("decode", 2)) == pytest.approx(1e9)
    assert balance.bandwidth(P0, D1) < 9e8  # the mean of the rank: D1 was not used for longest


def test_what_a_pull_takes(subtests):
    with subtests.test("before the first one as long as a transfer, and a moment"):
        _, balance = known()
        for _ in range(9):
            balance.observe_admitted(D0, P0, moved(2e9))
        pace = balance.pull_pace(D0, P0)
        assert pace.bytes_per_s == pytest.approx(2e9, rel=0.01)
        assert pace.begins_s + 2e8 / pace.bytes_per_s == pytest.approx(0.105, rel=0.01)
    with subtests.test("a large one measures the link of the pair, and what is usual for its source"):
        _, balance = known()
        for _ in range(9):
            balance.observe_pulled(D0, P0, pulled(0.005 + 64 * MIB / 1e8))
            balance.observe_pulled(D0, P1, pulled(0.005 + 64 * MIB / 4e8))
        paces = [balance.pull_pace(D0, rank).bytes_per_s for rank in (P0, P1, D1)]
        assert paces[:2] == pytest.approx([1e8, 4e8], rel=0.01) and 1e8 < paces[2] < 4e8
        assert balance.pull_pace(P0, D0).bytes_per_s == balance.bandwidth(D0, P0) == PRIOR_BANDWIDTH
    with subtests.test("a small one measures how long a source takes to begin"):
        _, balance = known()
        for _ in range(9):
            balance.observe_pulled(D0, P0, pulled(0.05, size_bytes=1_000))
        assert balance.pull_pace(D0, P1).begins_s == pytest.approx(0.05, rel=0.01)
        assert balance.pull_pace(D0, P1).bytes_per_s == PRIOR_BANDWIDTH
    with subtests.test("one that took less than that measures it, too"):
        for _ in range(50):
            balance.observe_pulled(D0, P0, pulled(0.002, size_bytes=2 * MIB))
        assert balance.pull_pace(D0, P1).begins_s < 0.01
    with subtests.test("a rank that begins anew has no past"):
        balance.forget(D0)
        assert balance.pull_pace(D0, P1).begins_s == pytest.approx(0.005)


def test_arrivals_are_counted_by_the_second_and_fade():
    arrivals = speeds_module.Arrivals(0.0)
    assert arrivals.per_s(0.0) == 0.0
    for tenth in range(1, 6_001):
        arrivals.add(tenth / 10)
        if tenth in (100, 300, 6_000):
            assert arrivals.per_s(tenth / 10) == pytest.approx(10.0, rel=0.02)
    assert arrivals.per_s(660.0) == pytest.approx(5.0, rel=0.02)


def test_a_few_seconds_are_too_short_to_tell_how_many_come():
    arrivals = speeds_module.Arrivals(0.0)
    arrivals.add(0.001)
    assert arrivals.per_s(0.001) == pytest.approx(0.1, rel=0.1)


def test_waits_for_a_prefix_add_up_and_fade_until_they_are_spent(subtests):
    paid, prefix, other = speeds_module.PaidWaits(), BlockHash(1), BlockHash(2)
    paid.add(prefix, 3.0, 0.0)
    paid.add(prefix, 1.0, 60.0)
    assert paid.of(prefix, 60.0) == pytest.approx(2.5)
    paid.add(other, 0.0, 60.0)
    assert paid.of(other, 60.0) == 0.0
    with subtests.test("the least recently paid one is forgotten first"):
        for number in range(10, 10 + 4_096):
            paid.add(BlockHash(number), 1.0, 61.0)
        assert paid.of(prefix, 61.0) == 0.0
        assert paid.of(BlockHash(10), 61.0) == 1.0
    with subtests.test("whoever computes a copy spends them"):
        paid.spend(BlockHash(10))
        assert paid.of(BlockHash(10), 61.0) == 0.0
