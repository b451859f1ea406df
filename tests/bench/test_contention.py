"""The workloads of bench.placement, the rules of its peers, and how its tables are judged."""

from collections import Counter
from statistics import median

import pytest

from bench.placement.cells import CELL_POLICIES, Cell, Fleet
from bench.placement.figures import (
    arrivals_per_s,
    counts_of,
    figures_of,
    goals_of,
    jain,
    means_of,
    ratios,
    verdicts,
)
from bench.placement.generators import LONG_TOKENS, SHORT_TOKENS, WORKLOADS, closed_arrivals, open_arrivals
from bench.placement.oracle import Outlook
from bench.placement.peers import PEERS, D2lpm, DynamoCost, LlmdRemainingWork, LlmdScores, PrebleE2, Standing
from bench.placement.robustness import WRONG
from bench.placement.simulation import ONE_PLAN, Simulation
from services.router.replay.ranks import DecodeRank
from services.router.replay.setting import Setting
from services.router.replay.workload import BLOCK_TOKENS, Job, TraceRequest
from services.values.kv import PageBooks
from services.values.rank_reports import RankLoad

pytestmark = pytest.mark.long


def test_agents_have_the_published_shape(subtests):
    sessions = WORKLOADS["agents"](1, 2_000)
    requests = open_arrivals(sessions, 1.0, 1)
    with subtests.test("contexts, new parts and turns"):
        assert median(request.prompt_tokens for request in requests) == pytest.approx(37_000, rel=0.1)
        assert median(request.new_tokens for request in requests) == pytest.approx(2_000, rel=0.1)
        turns = [len(session.turns) for session in sessions]
        assert min(turns) == 3 and 36 <= max(turns) <= 42
        quiet = [r for r in requests if r.prompt_tokens >= LONG_TOKENS and r.new_tokens < SHORT_TOKENS]
        assert len(quiet) / len(requests) == pytest.approx(0.49, abs=0.05)
    with subtests.test("a prompt begins with the last one and its answer"):
        last: dict[str, TraceRequest] = {}
        for request in requests:
            if (before := last.get(request.session)) is not None:
                assert request.blocks[: len(before.answered)] == before.answered
                assert before.number in request.after
            assert len(request.blocks) == request.prompt_tokens // BLOCK_TOKENS
            assert all(number < request.number for number in request.after)
            last[request.session] = request
    with subtests.test("sub-agents share a prefix, and their parent waits for them"):
        helpers = [request for request in requests if request.session.count(".") == 2]
        first = {request.session: request for request in reversed(helpers)}
        assert len({request.blocks[:8] for request in first.values()}) == 3 < len(first)
        parents = [request for request in requests if len(request.after) > 1]
        assert {requests[parent.after[0]].session for parent in parents} <= {s.session for s in parents}
    with subtests.test("the same seed makes the same requests, at any load"):
        assert requests == open_arrivals(WORKLOADS["agents"](1, 2_000), 1.0, 1)
        assert requests != open_arrivals(WORKLOADS["agents"](2, 2_000), 1.0, 1)
        slower = open_arrivals(sessions, 0.5, 1)
        assert [r.blocks for r in slower] == [r.blocks for r in requests]
        assert slower[-1].arrival_s == pytest.approx(2 * requests[-1].arrival_s)


def test_arrivals(subtests):
    with subtests.test("closed: a user has one session at a time"):
        requests = closed_arrivals(WORKLOADS["mixed"](1, 300), 5, 1)
        firsts = [request for request in requests if not request.after]
        assert len(firsts) == 5
        followed = Counter(number for request in requests for number in request.after)
        assert set(followed.values()) == {1}
    with subtests.test("a burst comes within two seconds"):
        sessions = WORKLOADS["burst"](1, 2_000)
        requests = open_arrivals(sessions, 0.01, 1)
        arrivals = {request.session: request.arrival_s for request in requests if not request.after}
        for burst in range(5):
            crowd = [arrivals[f"s{i}"] for i, session in enumerate(sessions) if session.burst == burst]
            assert len(crowd) > 5 and max(crowd) - min(crowd) <= 2.0
    with subtests.test("one computing rank is slow"):
        for layout, at in (("8", 0), ("4+4", 1)):
            setting = Fleet("slow", layout).setting
            speeds = [[timing.tokens_per_s for timing in setting.timings(3, num)] for num in (1, 0)]
            assert speeds[0][0] == pytest.approx(speeds[0][1] / 3) and len(set(speeds[1])) == 1
            simulation = Simulation(setting, "round-robin", [])
            ranks = simulation.ranks
            slow = [rank.id.worker for rank in ranks if rank.timing.tokens_per_s < 2_000]
            assert slow == ["dp"[at]]


def request(blocks: int = 10, client: int = 0) -> TraceRequest:
    return TraceRequest(
        1, 0.0, tuple(range(blocks)), blocks * BLOCK_TOKENS, 100, "s", client=client, new_tokens=100
    )


def standing(held: int = 0, used: int = 0, waiting: int = 0, **figures: int) -> Standing:
    books = PageBooks(100, 100 - used, 0, used, 0, 0)
    load = RankLoad(waiting=waiting, books=books, step_s=0.02, prefill_tokens_per_s=1_000.0)
    return Standing(load, 100, held=held, **figures)


def test_rules_of_peers(subtests):
    with subtests.test("llm-d's approximate scores: 3 for the hit, 2 for the queue, 2 for room"):
        rule = LlmdScores(2, 0, 2, 3, 2, exact=False)
        assert rule.choose(request(), [standing(held=10), standing()], 0.0) == 0
        assert rule.choose(request(), [standing(held=6, waiting=5), standing()], 0.0) == 1
        assert rule.choose(request(), [standing(held=3, used=60), standing()], 0.0) == 1
        cold = [standing(), standing(), standing()]
        chosen = []
        for _ in range(3):
            chosen.append(rule.choose(request(), cold, 0.0))
            rule.sent(chosen[-1], request(), 1, cold)
        assert sorted(chosen) == [0, 1, 2]
    with subtests.test("llm-d's precise scores: 4 for requests in flight outweigh 2 for the hit"):
        rule = LlmdScores(0, 4, 2, 2, 2, exact=True)
        assert rule.choose(request(), [standing(held=10, requests=4), standing(requests=1)], 0.0) == 1
        assert rule.choose(request(), [standing(held=10, requests=4), standing(requests=3)], 0.0) == 0
    with subtests.test("remaining work: tokens in flight and those to compute"):
        work = LlmdRemainingWork()
        assert work.choose(request(), [standing(held=9, uncached=4_500), standing()], 0.0) == 0
        assert work.choose(request(), [standing(held=9, uncached=4_700), standing()], 0.0) == 1
    with subtests.test("dynamo: blocks to prefill and blocks that decode"):
        dynamo = DynamoCost()
        assert dynamo.choose(request(), [standing(held=9, blocks=8), standing()], 0.0) == 0
        assert dynamo.choose(request(), [standing(held=9, blocks=10), standing()], 0.0) == 1
        assert dynamo.receiver([standing(held=9, blocks=8), standing(blocks=7)]) == 1
    with subtests.test("preble: hits above half of the prompt, unless the load is uneven"):
        preble = PrebleE2(100, 2)
        ranks = [standing(held=6), standing()]
        assert preble.choose(request(), ranks, 0.0) == 0
        assert preble.choose(request(), [standing(held=4), standing()], 0.0) == 0
        preble.sent(0, request(), 5_120, ranks)
        assert preble.choose(request(), [standing(held=4), standing()], 1.0) == 1  # explores
        assert preble.choose(request(), ranks, 1.0) == 1  # the heaviest gives
        assert preble.choose(request(), ranks, 200.0) == 0  # three minutes later
    with subtests.test("dlpm: a client whose deficit is spent goes elsewhere, others do not"):
        dlpm = D2lpm(2)
        ranks = [standing(held=9), standing()]
        assert dlpm.choose(request(), ranks, 0.0) == 0
        dlpm.sent(0, request(), 20_000, ranks)
        assert [dlpm.choose(request(client=client), ranks, 0.0) for client in (0, 1)] == [1, 0]
        dlpm.sent(1, request(), 20_000, ranks)
        assert dlpm.choose(request(), ranks, 0.0) == 0  # all got a quantum


def test_the_oracle_sees_what_is_sent(subtests):
    simulation = Simulation(Setting(0, 2), "oracle", [])
    rank, other = simulation.ranks
    assert isinstance(rank, DecodeRank)
    outlook = Outlook(lambda: 10.0)
    job = Job(request(10), rank, None, lambda job: None, lambda job: None)
    with subtests.test("a second prompt finds the blocks of the first, and counts once"):
        outlook.sent(job)
        assert outlook.pending_tokens(rank) == 5_120
        assert outlook.reused_tokens(rank, request(10)) == 5_119
        outlook.sent(Job(request(10), rank, None, lambda job: None, lambda job: None))
        assert outlook.pending_tokens(rank) == 5_121
        assert (outlook.pending_tokens(other), outlook.reused_tokens(other, request(10))) == (0, 0)
    with subtests.test("what is computed is no longer on its way"):
        outlook.computed(job)
        assert outlook.pending_tokens(rank) == 1 and outlook.reused_tokens(rank, request(10)) == 5_119
    with subtests.test("it knows who comes back, and where"):
        for at_s in (9.0, 11.0, 12.0, 20.0):
            outlook.will_return(at_s, rank)
        assert (outlook.returning(rank, 3.0), outlook.returning(other, 3.0)) == (2, 0)


def test_where_every_rank_holds_everything_only_new_parts_are_computed():
    requests = open_arrivals(WORKLOADS["mixed"](3, 30), 0.2, 3)
    simulation = Simulation(Setting(0, 2), "everywhere", requests)
    simulation.serve()
    assert all(job.computed_tokens == job.request.new_tokens for job in simulation.jobs)
    assert {job.decode for job in simulation.jobs} == set(simulation.ranks)
    figures = figures_of(simulation.jobs)
    assert 1.0 <= figures["ttft_mean_s"] / figures["alone_mean_s"] < 1.5
    with pytest.raises(ValueError, match="without prefill ranks"):
        Simulation(Setting(1, 2), "everywhere", requests)


def test_as_many_routers_as_there_are_compute_a_document_once():
    """Many ask at once about documents that nobody holds, each at the next router."""
    requests = open_arrivals(WORKLOADS["documents"](3, 150), 2.0, 3)
    documents = {request.blocks[0] for request in requests}
    for routers in (1, 2, 4):
        setting = Setting(0, 4, blocks=800, timing=Fleet("documents", "8").setting.timing, routers=routers)
        simulation = Simulation(setting, "ours", requests)
        simulation.serve()
        whole = [job for job in simulation.jobs if job.computed_tokens >= 48_128]
        assert len(whole) == len(documents)


def test_one_session_that_goes_on_alone_is_not_idle_time_of_all():
    usual = [float(second) for second in range(95)]
    assert arrivals_per_s([*usual, *[100.0] * 5]) == pytest.approx(95 / 94)
    assert arrivals_per_s([*usual, *[9_000.0] * 5]) == pytest.approx(95 / 94)
    assert arrivals_per_s([*usual[:90], *[9_000.0] * 10]) < 0.02
    assert arrivals_per_s([1.0, 3.0]) == 1.0


@pytest.mark.long
def test_every_policy_serves_sessions():
    requests = open_arrivals(WORKLOADS["mixed"](3, 40), 2.0, 3)
    fleet = Fleet("agents", "8").setting
    for policy in (*CELL_POLICIES, *ONE_PLAN):
        setting = Setting(1, 2, blocks=800, timing=fleet.timing)
        simulation = Simulation(setting, policy, requests)
        simulation.serve()  # it checks the books of every rank
        ended = {job.request.number: job.ended_s for job in simulation.jobs}
        assert len(ended) == len(requests)
        for job in simulation.jobs:
            waited = [ended[number] + job.request.wait_s for number in job.request.after]
            assert job.request.arrival_s == pytest.approx(max(waited, default=job.request.arrival_s))
        remote = {job.prefill is not None for job in simulation.jobs}
        if policy in (*PEERS, "sticky", *ONE_PLAN) and policy != "dynamo":
            assert remote == {policy != "ours-local"}


def test_a_cell_is_the_same_for_all_policies():
    cell = Cell(Fleet("documents", "2+6"), "closed", 0.95, 0.1)
    requests = cell.requests()
    assert requests == cell.requests() and len(requests) >= 600


def row(policy: str, **figures: float) -> dict[str, object]:
    usual = {"ttft_mean_s": 1.0, "ttft_p99_s": 5.0, "goodput_per_s": 2.0, "hits": 0.8}
    usual |= {"computed_tokens": 100, "jain": 0.9, "short_ttft_mean_s": 0.5, "short_ttft_p99_s": 2.0}
    return {"policy": policy} | usual | figures


def test_tables(subtests):
    rows = {
        "ours": row("ours"),
        "a": row("a", ttft_mean_s=1.04, ttft_p99_s=4.0, goodput_per_s=1.0, hits=0.81),
        "b": row("b", ttft_mean_s=2.0, ttft_p99_s=9.0, goodput_per_s=2.05, hits=0.5),
        "oracle": row("oracle", ttft_mean_s=0.1),
    }
    expected = {"ttft_mean_s": "leads", "ttft_p99_s": "loses", "goodput_per_s": "ties", "hits": "ties"}
    with subtests.test("ours is judged beside the best of the peers, within 3 %"):
        assert verdicts(rows, ("a", "b")) == expected
        assert verdicts({"ours": rows["ours"], "oracle": rows["oracle"]}, ("a",)) == {}
    with subtests.test("goals: more of agents where they are busy, and short prompts must not pay"):
        met = {goal["goal"]: (goal["got"], goal["met"]) for goal in goals_of("x", rows, ("a", "b"), True)}
        assert met == {
            "mean TTFT / best peer's": (pytest.approx(1 / 1.04), False),
            "goodput / best peer's": (pytest.approx(2.0 / 2.05), False),
            "mean TTFT / oracle's": (pytest.approx(10.0), False),
            "TTFT p99 of short prompts / best peer's": (1.0, True),
        }
        usual = goals_of("x", rows, ("a", "b"), False)
        assert [goal["goal"] for goal in usual] == list(met)[2:]
    with subtests.test("counts are of all cells"):
        counted = counts_of([expected, expected | {"ttft_mean_s": "loses"}])
        assert counted.startswith(
            "ours leads 1, ties 4, loses 3 of 2 cells: ttft_mean_s leads 1, ties 0, loses 1"
        )
    with subtests.test("ratios are to ours, and means of them geometric"):
        table = ratios(rows)
        assert table[0]["ttft_mean_s"] == 1.0 and table[1]["ttft_p99_s"] == pytest.approx(0.8)
        other = ratios(rows | {"a": row("a", ttft_p99_s=20.0)})
        assert means_of([table, other])[1]["ttft_p99_s"] == pytest.approx((0.8 * 4.0) ** 0.5)
    with subtests.test("equal shares are fair"):
        assert jain([2.0, 2.0]) == pytest.approx(1.0) and jain([1.0, 0.0]) == pytest.approx(0.5)


def test_a_router_that_starts_again_knows_what_ranks_hold_and_none_of_the_requests_in_flight(subtests):
    requests = open_arrivals(WORKLOADS["mixed"](1, 60), 0.5, 1)
    simulation = Simulation(Setting(0, 2), "ours", requests)
    (first,) = simulation._policies
    WRONG["started again"].prepare(simulation)
    (restarted,) = simulation._policies
    simulation.serve()
    assert len(simulation.jobs) == len(requests)
    again = restarted._now
    assert again is not first
    with subtests.test("it has read what was there before it started"):
        assert again.index.num_blocks(simulation.ranks[0].id.key) > 0
    with subtests.test("each router hears of its own requests alone"):
        assert not restarted._placed and not again._placed and not first._placed


def test_what_a_router_is_told_wrong(subtests):
    requests = open_arrivals(WORKLOADS["mixed"](1, 60), 0.5, 1)
    with subtests.test("speeds"):
        simulation = Simulation(Setting(2, 2), "ours", requests)
        WRONG["every second rank twice as fast"].prepare(simulation)
        assert [rank.load().prefill_tokens_per_s for rank in simulation.ranks] == [16e3, 8e3, 16e3, 8e3]
        simulation.serve()
        assert len(simulation.jobs) == len(requests)
    with subtests.test("bandwidth"):
        simulation = Simulation(Setting(2, 2), "ours", requests)
        WRONG["a tenth of the bandwidth"].prepare(simulation)
        prefill, *_, decode = (rank.id.key for rank in simulation.ranks)
        assert simulation._policies[0]._balance.bandwidth(prefill, decode) == pytest.approx(1.25e9)
