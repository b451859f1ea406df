"""These tests show what is in flight at which rank, and which ranks are well, under a clock of ours."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.ranks.observed import D0, D1, P0, P1, Clock, hashes, known, moved, predicted, pulled, took
from services.router.ranks.balance import Balance, Liveness
from services.values.kv import PageBooks
from services.values.rank import Plan, RankKey
from services.values.rank_reports import Overtaken, RankLoad
from services.values.request import Pulled


def test_a_remote_request_pends_on_prefill_until_admitted(balance):
    balance.sent("a", D0, P0, 700)
    balance.sent("b", D1, P0, 50)
    assert (balance.now(P0).pending_tokens, balance.now(D0).pending_tokens) == (750, 0)
    assert (balance.now(P0).running, balance.now(D0).running) == (2, 1)
    balance.admitted("a")
    assert (balance.now(P0).pending_tokens, balance.now(P0).running, balance.now(D0).running) == (50, 1, 1)
    balance.ended("a")
    assert balance.now(D0).running == 0


def test_whose_a_request_is_in_flight(subtests):
    with subtests.test("a local request pends on its decode rank"):
        _, balance = known()
        balance.sent("a", D0, None, 700)
        assert (balance.now(D0).pending_tokens, balance.now(D0).running) == (700, 1)
    with subtests.test("a retry leaves the first ranks"):
        _, balance = known()
        balance.sent("a", D0, P0, 700)
        balance.sent("a", D1, P1, 600)
        assert [balance.now(rank).pending_tokens for rank in (P0, P1)] == [0, 600]
        assert [balance.now(rank).running for rank in (D0, D1)] == [0, 1]
    with subtests.test("steps of unknown requests do nothing"):
        _, balance = known()
        balance.admitted("who")
        balance.ended("who")
        assert "in_flight=0" in repr(balance)
    with subtests.test("before a report the load is nil"):
        _, balance = known()
        assert balance.load(D0) == RankLoad()


def test_what_prompts_in_a_queue_have_in_common_is_counted_once(balance, clock, subtests):
    """The rank counted 9,000 tokens of each prompt when they came; we expect the later two to find 8,900."""
    for name, uncached in [("a", 9_000), ("b", 100), ("c", 100)]:
        balance.sent(name, D0, None, uncached, 9_000 - uncached)
    clock.now += 1
    load = RankLoad(waiting=2, pending_tokens=24_000, prefill_tokens_per_s=3_000.0)
    balance.report(D0, load)
    assert balance.now(D0).pending_tokens == 24_000 - 2 * 8_900
    with subtests.test("what other routers have sent there counts as reported"):
        balance.report(D0, replace(load, waiting=3, pending_tokens=29_000))
        assert balance.now(D0).pending_tokens == 29_000 - 2 * 8_900
    with subtests.test("where the rank found more than the index said, ours count as we expect"):
        balance.report(D0, replace(load, pending_tokens=6_200))
        assert balance.now(D0).pending_tokens == 6_200
    with subtests.test("the next one begins when the one before it has been computed"):
        balance.admitted("a")
        balance.report(D0, replace(load, waiting=1, pending_tokens=18_000))
        assert balance.now(D0).pending_tokens == 200
    balance.ended("b")
    balance.ended("c")
    assert balance.now(D0).pending_tokens == 18_000


def test_what_prompts_have_in_common_counts_as_a_rank_tells_that_knows_it(balance, clock):
    """It is not taken off twice, and counts whoever has sent it."""
    for name, uncached in [("a", 9_000), ("b", 100), ("c", 100)]:
        balance.sent(name, D0, None, uncached, 9_000 - uncached)
    clock.now += 1
    load = RankLoad(waiting=5, pending_tokens=42_000, prefill_tokens_per_s=3_000.0)
    for common, pending in [(0, 42_000), (26_700, 15_300), (41_000, 6_200)]:  # At least ours pend.
        balance.report(D0, replace(load, common_tokens=common))
        assert balance.now(D0).pending_tokens == pending
    clock.now += 0.5
    assert balance.now(D0).pending_tokens == 4_700


def test_a_rate_of_next_to_nothing_is_none(balance):
    for rate in (0.0, -1.0, 5e-324):
        balance.report(D0, RankLoad(pending_tokens=9, prefill_tokens_per_s=rate))
        assert balance.now(D0).compute_wait_s == 0.0
        assert balance.now(D0).tokens_per_s == balance.now(P0).tokens_per_s  # what is assumed of any


def test_a_prompt_waits_for_those_alone_that_it_does_not_overtake(balance, clock):
    overtaken = Overtaken(500, 3_000, 2), Overtaken(4_000, 9_000, 1)
    load = RankLoad(pending_tokens=13_000, prefill_tokens_per_s=1_000.0, overtaken=overtaken)
    balance.report(D0, load)
    now = balance.now(D0)
    assert [now.before(tokens) for tokens in (499, 500, 3_999, 4_000)] == [
        (1_000, 12_000, 3),
        (4_000, 9_000, 1),
        (4_000, 9_000, 1),
        (13_000, 0, 0),
    ]
    assert now.compute_wait_s == 1.0  # of one that is short enough
    balance.sent("a", D0, None, 700)
    assert balance.now(D0).before(100) == (1_700, 12_000, 3)  # It is not known yet where that one stands.
    clock.now += 1  # The chunk under way may be over by now, and is of one of those that stay before it.
    assert balance.now(D0).before(100) == (700, 12_000, 3)


def test_what_a_report_has_not_seen_is_not_taken_off_it(balance, clock):
    balance.report(D0, RankLoad(waiting=2, pending_tokens=20_000, prefill_tokens_per_s=1_000.0))
    balance.sent("a", D0, None, 100, 0)
    balance.sent("b", D0, None, 100, 8_000)
    assert balance.now(D0).pending_tokens == 20_200
    clock.now += 1
    balance.report(D0, RankLoad(waiting=4, pending_tokens=28_200, prefill_tokens_per_s=1_000.0))
    assert balance.now(D0).pending_tokens == 20_200


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


def test_what_a_failure_costs(subtests):
    with subtests.test("penalties double up to half a minute"):
        clock, balance = known()
        for penalty_s in (1, 2, 4, 8, 16, 30, 30):
            balance.failed(P0)
            clock.now += penalty_s - 0.01
            assert balance.liveness(P0) is Liveness.FAILED
            clock.now += 0.01
            assert balance.liveness(P0) is Liveness.LIVE
        assert balance.liveness(P1) is Liveness.LIVE
    with subtests.test("many failures at once are one"):
        clock, balance = known()
        for _ in range(10):
            balance.failed(P0)
        clock.now += 1
        assert balance.liveness(P0) is Liveness.LIVE
    with subtests.test("a local success says nothing of a prefill rank"):
        clock, balance = known()
        balance.failed(P0)
        balance.observe_admitted(D0, None, took(plan=Plan.LOCAL))
        assert balance.liveness(P0) is Liveness.FAILED


def test_a_success_ends_the_penalty_and_its_doubling(subtests):
    for rank in [D0, P0]:
        with subtests.test(rank=rank):
            clock, balance = known()
            balance.failed(rank)
            clock.now += 1
            balance.failed(rank)
            balance.observe_admitted(D0, P0, took())
            assert balance.liveness(rank) is Liveness.LIVE
            balance.failed(rank)
            clock.now += 1
            assert balance.liveness(rank) is Liveness.LIVE


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
    balance.forget(P0)  # a new incarnation may be one that never reports
    assert balance.liveness(P0) is Liveness.LIVE


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
    assert predicted(balance, D0, hashes(1, 2)) == 0
    assert balance.bandwidth(P1, D0) > slow
    balance.admitted("a")
    balance.ended("a")
    balance.sent("a", D0, P0, 70)
    assert balance.now(P0).pending_tokens == 70


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


def test_a_source_that_gives_nothing_is_left_alone_for_a_while(subtests):
    for why, least_s in (("busy", 1.0), ("gone", 1.0), ("late", 1.0), ("failed", 1.0), ("corrupt", 60.0)):
        with subtests.test(why):
            clock, balance = known()
            balance.observe_pulled(D0, P0, Pulled(refused=why))
            clock.now += least_s - 0.01
            assert not balance.may_lend(D0) and balance.may_lend(D1)
            assert balance.liveness(D0) is Liveness.LIVE
            clock.now += 0.01
            assert balance.may_lend(D0)
    with subtests.test("longer each time, until it gives something"):
        for is_left_alone in (True, False):
            balance.observe_pulled(D0, P0, Pulled(refused="late"))
            clock.now += 1.5
            assert balance.may_lend(D0) is not is_left_alone
            clock.now += 30
            balance.observe_pulled(D0, P0, pulled(0.1))
    with subtests.test("that it holds too little by now is no fault"):
        balance.observe_pulled(D1, P0, Pulled(refused="evicted", held_tokens=0))
        assert balance.may_lend(D1)


def test_who_may_lend(subtests):
    books = PageBooks(total=80, free=0, cached=70, locked=0, private=10, quarantined=0)
    for load, may_lend in (
        (RankLoad(draining=True), True),
        (RankLoad(stalled=True), False),
        (RankLoad(books=books, granted_pages=9), True),
        (RankLoad(books=books, granted_pages=10), False),
    ):
        with subtests.test(load=load):
            _, balance = known()
            balance.report(D0, load)
            assert balance.may_lend(D0) is may_lend
    with subtests.test("a rank that fails, or is silent, is no source"):
        _, balance = known()
        balance.failed(D0)
        balance.fell_silent(P0)
        assert not balance.may_lend(D0) and not balance.may_lend(P0)


def test_a_rank_is_as_fast_as_its_requests_were(subtests):
    """Requests of 1,000 tokens come by four, and are computed one after the other in a second each."""

    def rate_after(num_rounds: int, told: float, **changes) -> float:
        clock, balance = known()
        report = RankLoad(prefill_tokens_per_s=told)
        balance.report(D0, report)
        for _ in range(num_rounds):
            for name in "abcd":
                balance.sent(name, D0, None, 1_000)
            for name in "abcd":
                clock.now += 1
                balance.observe_pace(name, took(plan=Plan.LOCAL, computed_tokens=1_000, **changes))
                balance.ended(name)
            balance.report(D0, report)
        return balance.now(D0).tokens_per_s

    for told in (500.0, 2_000.0, 4_000.0):
        with subtests.test("a wrong report is corrected", told=told):
            assert 1_000 / 1.3 < rate_after(20, told) < 1_300
            assert abs(rate_after(2, told) - 1_000) < abs(told - 1_000)
    for told in (850.0, 1_000.0, 1_200.0):
        with subtests.test("a report that is about right stands", told=told):
            assert rate_after(20, told) == told
    with subtests.test("who waited for pages or a source tells nothing of computing"):
        assert rate_after(20, 2_000.0, decode_queue_s=0.9) == 2_000.0
        assert rate_after(20, 2_000.0, pulled=Pulled(512, 1 << 20, 0.9)) == 2_000.0
    with subtests.test("who waited for other prompts tells of both"):
        assert rate_after(20, 2_000.0, prefill_queue_s=0.9, prefill_compute_s=0.1) == rate_after(20, 2_000.0)
    with subtests.test("what was computed meanwhile, of whom the router does not know, counts"):
        clock, balance = known()
        for _ in range(20):
            balance.report(D0, RankLoad(prefill_tokens_per_s=2_000.0))
            balance.sent("a", D0, None, 1_000)
            clock.now += 9
            told = took(plan=Plan.LOCAL, computed_tokens=1_000, rank_tokens=3_000, prefill_queue_s=2.0)
            balance.observe_pace("a", replace(told, prefill_compute_s=1.0))
            balance.ended("a")
        assert 0.5 <= balance.pace.of(D0, clock.now) < 0.6
    with subtests.test("what a rank held beyond what was known makes it no faster"):
        clock, balance = known()
        for _ in range(20):
            balance.report(D0, RankLoad(prefill_tokens_per_s=1_000.0))
            balance.sent("a", D0, None, 4_000)
            clock.now += 1
            balance.observe_pace("a", took(plan=Plan.LOCAL, computed_tokens=1_000))
            balance.ended("a")
        assert balance.pace.of(D0, clock.now) == 1.0
    with subtests.test("a report of more time than has passed tells nothing"):
        assert rate_after(20, 2_000.0, transfer_s=9.0, decode_queue_s=-9.0) == 2_000.0
    with subtests.test("another life of the rank, and time, forget it"):
        clock, balance = known()
        balance.pace.observe(D0, 1.0, 3.0, clock.now)
        before = balance.pace.of(D0, clock.now)
        assert before < balance.pace.of(D0, clock.now + 600) == 1.0
        balance.forget(D0)
        assert balance.pace.of(D0, clock.now) == 1.0 > before
