"""What a router learns of its ranks and remembers of its requests, under a clock of ours."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.decision import place
from services.router.placement.price import PriceWeights
from services.router.ranks import predictions as predictions_module
from services.router.ranks import speeds as speeds_module
from services.router.ranks.balance import Balance, Liveness
from services.values.kv import BlockHash
from services.values.load import RankLoad
from services.values.rank import Generation, Plan, RankId, RankKey
from services.values.request import Admitted

D0, D1 = RankKey("decode", 0), RankKey("decode", 1)
P0, P1 = RankKey("prefill", 0), RankKey("prefill", 1)
PRIOR_RATE, PRIOR_BANDWIDTH = 10_000.0, 1e9
MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def balance(clock) -> Balance:
    return Balance(clock, prior_tokens_per_s=PRIOR_RATE, prior_bandwidth=PRIOR_BANDWIDTH, chunk_tokens=1_000)


def took(**changes) -> Admitted:
    """2000 tokens computed at 4000 tokens/s by a prefill rank; nothing moved."""
    usual = Admitted(
        prompt_tokens=2_000,
        decode_prefix_len=0,
        prefill_prefix_len=0,
        computed_tokens=2_000,
        kv_bytes_moved=0,
        kv_bytes_prompt=0,
        decode_queue_s=0.0,
        prefill_queue_s=0.0,
        prefill_compute_s=0.5,
        transfer_s=0.0,
        plan=Plan.REMOTE,
    )
    return replace(usual, **changes)


# -- rates ----------------------------------------------------------------------------------------


def test_before_anything_was_measured_the_priors_hold(balance):
    assert balance.now(P0).tokens_per_s == PRIOR_RATE
    assert balance.bandwidth(P0, D0) == PRIOR_BANDWIDTH


def test_the_first_measurement_replaces_the_prior_for_all(balance):
    balance.observe_admitted(D0, P0, took())
    assert balance.now(P0).tokens_per_s == pytest.approx(4_000)
    assert balance.now(P1).tokens_per_s == pytest.approx(4_000)


def test_a_rate_belongs_to_the_rank_that_computed(balance):
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


def test_tiny_computations_are_no_measure(balance):
    balance.observe_admitted(D0, P0, took(computed_tokens=15))
    balance.observe_admitted(D0, P0, took(prefill_compute_s=0.0))
    assert balance.now(P0).tokens_per_s == PRIOR_RATE


def test_small_computations_count_for_little(balance):
    balance.observe_admitted(D0, P0, took(computed_tokens=16))
    assert balance.now(P0).tokens_per_s == pytest.approx(32)
    balance.observe_admitted(D0, P0, took())
    assert balance.now(P0).tokens_per_s > 3_500


def test_what_the_rank_itself_reports_comes_first(balance):
    balance.observe_admitted(D0, None, took(plan=Plan.LOCAL))
    balance.report(D0, RankLoad(prefill_tokens_per_s=7_000.0))
    assert balance.now(D0).tokens_per_s == 7_000
    balance.report(D0, RankLoad(prefill_tokens_per_s=0.0))  # not measured by the rank
    assert balance.now(D0).tokens_per_s == pytest.approx(4_000)


def test_an_old_measurement_fades_towards_the_usual(balance, clock):
    balance.observe_admitted(D0, P0, took(prefill_compute_s=20.0))  # 100 tokens/s: never again?
    for _ in range(100):
        balance.observe_admitted(D0, P1, took())
    assert balance.now(P0).tokens_per_s == pytest.approx(100)
    clock.now += 600
    assert balance.now(P0).tokens_per_s == pytest.approx(4_000, rel=0.01)


# -- bandwidths -----------------------------------------------------------------------------------


def moved(bandwidth: float, compute_s: float = 0.5, size_bytes: float = 64 * MIB) -> Admitted:
    """What placement foretells for 2000 tokens in two chunks: half the bytes are in the last one."""
    took_s = max(compute_s, size_bytes / bandwidth) + size_bytes / 2 / bandwidth
    return took(kv_bytes_moved=int(size_bytes), prefill_compute_s=compute_s, transfer_s=took_s - compute_s)


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


def test_a_link_falls_back_to_its_prefill_rank_then_to_all(balance):
    balance.observe_admitted(D0, P0, moved(2e8))
    balance.observe_admitted(D0, P1, moved(1e9))
    assert balance.bandwidth(P0, D0) == pytest.approx(2e8)
    assert balance.bandwidth(P0, D1) == pytest.approx(2e8)
    assert 2e8 < balance.bandwidth(RankKey("prefill", 2), D0) < 1e9


def test_links_of_one_prefill_rank_differ(balance):
    for _ in range(5):
        balance.observe_admitted(D0, P0, moved(2e8))
        balance.observe_admitted(D1, P0, moved(1e9))
    assert balance.bandwidth(P0, D0) == pytest.approx(2e8)
    assert balance.bandwidth(P0, D1) == pytest.approx(1e9)


def test_an_old_link_fades_towards_the_usual(balance, clock):
    balance.observe_admitted(D0, P0, moved(1e7))
    for _ in range(50):
        balance.observe_admitted(D0, P1, moved(1e9))
    clock.now += 900
    assert balance.bandwidth(P0, D0) == pytest.approx(1e9, rel=0.01)


def test_small_transfers_are_no_measure(balance):
    balance.observe_admitted(D0, P0, moved(2e8, size_bytes=MIB - 1))
    assert balance.bandwidth(P0, D0) == PRIOR_BANDWIDTH


@pytest.mark.parametrize(("transfer_s", "expected"), [(0.0, 1e12), (1e9, 1e6)])
def test_a_bandwidth_stays_within_what_hardware_does(balance, transfer_s, expected):
    balance.observe_admitted(D0, P0, took(kv_bytes_moved=10**12, transfer_s=transfer_s))
    assert balance.bandwidth(P0, D0) == expected


def test_a_prefill_rank_remembers_so_many_links(balance, monkeypatch):
    monkeypatch.setattr(speeds_module, "_MAX_LINKS", 2)
    for rank, bandwidth in ((D0, 2e8), (D1, 1e9), (D0, 2e8), (RankKey("decode", 2), 1e9)):
        balance.observe_admitted(rank, P0, moved(bandwidth))
    assert balance.bandwidth(P0, D0) == pytest.approx(2e8)
    assert balance.bandwidth(P0, RankKey("decode", 2)) == pytest.approx(1e9)
    assert balance.bandwidth(P0, D1) < 9e8  # the mean of the rank: D1 was not used for longest


# -- in flight ------------------------------------------------------------------------------------


def test_a_remote_request_pends_on_prefill_until_admitted(balance):
    balance.sent("a", D0, P0, 700)
    balance.sent("b", D1, P0, 50)
    assert (balance.now(P0).pending_tokens, balance.now(D0).pending_tokens) == (750, 0)
    assert (balance.now(P0).running, balance.now(D0).running) == (2, 1)
    balance.admitted("a")
    assert (balance.now(P0).pending_tokens, balance.now(P0).running, balance.now(D0).running) == (50, 1, 1)
    balance.ended("a")
    assert balance.now(D0).running == 0


def test_a_local_request_pends_on_its_decode_rank(balance):
    balance.sent("a", D0, None, 700)
    assert (balance.now(D0).pending_tokens, balance.now(D0).running) == (700, 1)


def test_a_report_counts_what_was_sent_well_before_it(balance, clock):
    balance.sent("seen", D0, None, 700)
    clock.now += 1
    balance.sent("crossing", D0, None, 30)
    clock.now += 0.01
    balance.report(D0, RankLoad(pending_tokens=700))
    balance.sent("later", D0, None, 5)
    assert balance.now(D0).pending_tokens == 735
    clock.now += 1
    balance.report(D0, RankLoad(pending_tokens=900))  # another router's among them
    assert balance.now(D0).pending_tokens == 900
    balance.ended("crossing")
    assert balance.now(D0).pending_tokens == 900


def test_what_cannot_have_been_computed_pends_though_the_rank_reports_nothing(balance, clock):
    speed = {"prefill_tokens_per_s": 1_000.0}
    for name in "abc":
        balance.sent(name, D0, P0, 2_000)
    clock.now += 0.5
    balance.report(P0, RankLoad(**speed))  # they are on their way, on a crowded machine
    assert (balance.now(P0).pending_tokens, balance.now(P0).queued) == (5_500, 2)
    clock.now += 1
    balance.report(P0, RankLoad(pending_tokens=7_000, waiting=4, **speed))  # another router's among them
    assert (balance.now(P0).pending_tokens, balance.now(P0).queued) == (7_000, 4)
    balance.admitted("a")
    balance.report(P0, RankLoad(**speed))
    assert (balance.now(P0).pending_tokens, balance.now(P0).queued) == (2_500, 1)
    for name in "bc":
        balance.ended(name)
    assert (balance.now(P0).pending_tokens, balance.now(P0).queued) == (0, 0)


def test_a_retry_leaves_the_first_ranks(balance):
    balance.sent("a", D0, P0, 700)
    balance.sent("a", D1, P1, 600)
    assert [balance.now(rank).pending_tokens for rank in (P0, P1)] == [0, 600]
    assert [balance.now(rank).running for rank in (D0, D1)] == [0, 1]


def test_steps_of_unknown_requests_do_nothing(balance):
    balance.admitted("who")
    balance.ended("who")
    assert "in_flight=0" in repr(balance)


class Flights(RuleBasedStateMachine):
    """Against plain sums over a dictionary of requests."""

    request_ids = st.sampled_from("abcd")
    decodes = st.sampled_from([D0, D1])
    prefills = st.sampled_from([None, P0, P1])

    def __init__(self) -> None:
        super().__init__()
        self.balance = Balance(Clock())
        self.model: dict[str, tuple[RankKey, RankKey, int, bool]] = {}

    @rule(request_id=request_ids, decode=decodes, prefill=prefills, tokens=st.integers(0, 99))
    def send(self, request_id, decode, prefill, tokens):
        self.balance.sent(request_id, decode, prefill, tokens)
        self.model[request_id] = (decode, prefill or decode, tokens, True)

    @rule(request_id=request_ids)
    def admit(self, request_id):
        self.balance.admitted(request_id)
        if request_id in self.model:
            self.model[request_id] = (*self.model[request_id][:3], False)

    @rule(request_id=request_ids)
    def end(self, request_id):
        self.balance.ended(request_id)
        self.model.pop(request_id, None)

    @invariant()
    def agrees(self):
        flights = self.model.values()
        for rank in (D0, D1, P0, P1):
            pending = sum(tokens for _, computing, tokens, pends in flights if pends and computing == rank)
            assert self.balance.now(rank).pending_tokens == pending
        for rank in (D0, D1):
            assert self.balance.now(rank).running == sum(decode == rank for decode, *_ in flights)
        for rank in (P0, P1):
            at_work = sum(pends and computing == rank for _, computing, _, pends in flights)
            assert self.balance.now(rank).running == at_work


Flights.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestFlights = Flights.TestCase


# -- health ---------------------------------------------------------------------------------------


def test_penalties_double_up_to_half_a_minute(balance, clock):
    for penalty_s in (1, 2, 4, 8, 16, 30, 30):
        balance.failed(P0)
        clock.now += penalty_s - 0.01
        assert balance.liveness(P0) is Liveness.FAILED
        clock.now += 0.01
        assert balance.liveness(P0) is Liveness.LIVE
    assert balance.liveness(P1) is Liveness.LIVE


def test_many_failures_at_once_are_one(balance, clock):
    for _ in range(10):
        balance.failed(P0)
    clock.now += 1
    assert balance.liveness(P0) is Liveness.LIVE


@pytest.mark.parametrize("rank", [D0, P0])
def test_a_success_ends_the_penalty_and_its_doubling(balance, clock, rank):
    balance.failed(rank)
    clock.now += 1
    balance.failed(rank)
    balance.observe_admitted(D0, P0, took())
    assert balance.liveness(rank) is Liveness.LIVE
    balance.failed(rank)
    clock.now += 1
    assert balance.liveness(rank) is Liveness.LIVE


def test_a_local_success_says_nothing_of_a_prefill_rank(balance):
    balance.failed(P0)
    balance.observe_admitted(D0, None, took(plan=Plan.LOCAL))
    assert balance.liveness(P0) is Liveness.FAILED


def test_a_rank_that_drains_is_excluded(balance):
    balance.report(D0, RankLoad(stalled=True))
    assert balance.liveness(D0) is Liveness.STALLED
    balance.report(D0, RankLoad(draining=True))
    assert balance.liveness(D0) is Liveness.DRAINING
    balance.failed(D0)
    assert balance.liveness(D0) is Liveness.FAILED
    assert "decode/0" in repr(balance)


def test_a_rank_that_fell_silent_is_excluded_until_it_reports(balance, clock):
    balance.report(P0, RankLoad(pending_tokens=9))
    balance.fell_silent(P0)
    balance.unreported(P0)
    clock.now += 1_000.0
    assert balance.liveness(P0) is Liveness.SILENT and balance.liveness(P1) is Liveness.LIVE
    balance.report(P0, RankLoad())
    assert balance.liveness(P0) is Liveness.LIVE
    balance.fell_silent(P0)
    balance.forget(P0)  # a new life may be one that never reports
    assert balance.liveness(P0) is Liveness.LIVE


def test_before_a_report_the_load_is_nil(balance):
    assert balance.load(D0) == RankLoad()


def test_a_forgotten_rank_begins_anew(balance):
    for rank in (D0, P0):
        balance.failed(rank)
        balance.report(rank, RankLoad(pending_tokens=9))
    balance.observe_admitted(D1, P1, moved(1e9))
    for _ in range(9):
        balance.observe_admitted(D0, P1, moved(1e7, compute_s=0.5))
    balance.sent("a", D0, P0, 700)
    balance.predict(D0, hashes(1, 2))
    slow = balance.bandwidth(P1, D0)
    for rank in (D0, P0):
        balance.forget(rank)
        assert balance.liveness(rank) is Liveness.LIVE
        assert balance.load(rank) == RankLoad()
        assert (balance.now(rank).pending_tokens, balance.now(rank).running) == (0, 0)
    assert balance.predicted_match(D0, hashes(1, 2)) == 0
    assert balance.bandwidth(P1, D0) > slow
    balance.admitted("a")
    balance.ended("a")
    balance.sent("a", D0, P0, 70)
    assert balance.now(P0).pending_tokens == 70


# -- predictions ----------------------------------------------------------------------------------


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number) for number in numbers]


def test_a_prediction_matches_from_the_first_block_on(balance):
    balance.predict(D0, hashes(1, 2, 3))
    assert balance.predicted_match(D0, hashes(1, 2, 3, 4)) == 3
    assert balance.predicted_match(D0, hashes(1, 2)) == 2
    assert balance.predicted_match(D0, hashes(9, 2, 3)) == 0
    assert balance.predicted_match(D1, hashes(1)) == 0


def test_a_prediction_ends(balance, clock):
    balance.predict(D0, hashes(1, 2), ttl_s=5)
    clock.now += 3
    balance.predict(D0, hashes(1), ttl_s=5)
    clock.now += 2
    assert balance.predicted_match(D0, hashes(1, 2)) == 1
    clock.now += 3
    assert balance.predicted_match(D0, hashes(1, 2)) == 0


def test_a_renewed_prediction_outlives_the_first(balance, clock):
    balance.predict(D0, hashes(1, 2), ttl_s=1)
    balance.predict(D0, hashes(1, 2), ttl_s=9)
    clock.now += 2
    balance.predict(D1, hashes(7))
    assert balance.predicted_match(D0, hashes(1, 2)) == 2


def test_a_shorter_prediction_does_not_cut_a_longer_one(balance, clock):
    balance.predict(D0, hashes(1, 2), ttl_s=9)
    balance.predict(D0, hashes(1), ttl_s=1)
    clock.now += 2
    balance.predict(D1, hashes(7))
    assert balance.predicted_match(D0, hashes(1, 2)) == 2


def test_predictions_are_bounded_oldest_out_first(balance, monkeypatch):
    monkeypatch.setattr(predictions_module, "_MAX_BLOCKS", 4)
    for index in range(3):
        balance.predict(RankKey("decode", index), hashes(1, 2))
    matched = [balance.predicted_match(RankKey("decode", index), hashes(1, 2)) for index in range(3)]
    assert matched == [0, 2, 2]
    balance.predict(D0, hashes(*range(10)))
    assert balance.predicted_match(D0, hashes(*range(10))) == 4


def test_what_was_sent_too_late_for_a_report_waits_too(clock, balance):
    balance.report(D0, RankLoad(waiting=10, admitted_per_s=5.0))
    assert balance.queue_wait_s(D0) == 2.0
    clock.now += 1
    balance.sent("a", D0, P0, 100)
    balance.sent("b", D0, None, 100)
    assert balance.queue_wait_s(D0) == 2.4
    balance.report(D0, RankLoad(waiting=10, admitted_per_s=5.0))  # perhaps made before they came
    assert balance.queue_wait_s(D0) == 2.4
    clock.now += 1
    balance.report(D0, RankLoad(waiting=12, admitted_per_s=5.0))
    assert balance.queue_wait_s(D0) == 2.4
    balance.report(D0, RankLoad(waiting=0, admitted_per_s=5.0))
    balance.report(D1, RankLoad(waiting=9))  # how fast they come in is not known
    assert (balance.queue_wait_s(D0), balance.queue_wait_s(D1), balance.queue_wait_s(P0)) == (0, 0, 0)
