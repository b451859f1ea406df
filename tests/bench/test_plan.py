"""These tests show what bench.plan counts, and that its loop loses no request while ranks come and go."""

from math import inf
from types import SimpleNamespace

import pytest

from bench import closed_loop
from bench.closed_loop import POOL_BLOCKS, TIMING, Loop, Size, fleet, follower, observed, run
from bench.plan import measured, spread
from services.router.replay.observed import Observation
from services.router.replay.planner import Trial, job_ttft_s, quantile
from services.router.replay.replay import Replay
from services.router.replay.setting import Setting
from services.router.replay.workload import Job


def test_what_is_measured():
    """The first tenth to come is left out, whatever its numbers."""
    ttft_s = dict(enumerate([0.1] * 18 + [50.0, 60.0]))
    sent_s = {number: 20.0 - number for number in ttft_s}
    came = [SimpleNamespace(arrival_s=s, computed_tokens=s, prompt_tokens=20) for s in range(20)]
    seen = SimpleNamespace(requests=came)
    row = measured([(SimpleNamespace(ttft_s=ttft_s, sent_s=sent_s), seen)] * 2)
    assert row["counted"] == 36 and row["measured_p99_s"] == row["p99_high_s"] == 0.1
    assert row["measured_hits"] == pytest.approx(1 - sum(range(2, 20)) / (18 * 20))
    low_s, high_s = spread([*range(1_000)], 0.99)
    assert 980 <= low_s < 990 < high_s <= 999


def test_busy_ranks_tell_what_more_of_them_would_give():
    asked = [request for request in closed_loop.requests() if request.arrival_s < 500.0]

    def served(size: Size) -> list[Job]:
        setting = Setting(size.prefill, size.decode, blocks=POOL_BLOCKS, timing=TIMING)
        replay = Replay(setting, "ours-alone", asked)
        replay.serve()
        return replay.jobs

    few, more = Size(1, 2), Size(3, 3)
    seen = sorted((observed(job, inf) for job in served(few)), key=lambda each: each.arrival_s)
    waited = [each for each in seen if each.queue_s > each.compute_s]
    assert len(waited) > len(seen) / 20
    trial = Trial(Observation(fleet(few, 1e9), seen), closed_loop.GOALS, 1.0, 1)
    for size in (few, more):
        ttft, told = sorted(map(job_ttft_s, served(size))), trial.of(size)
        assert told.ttft_p50_s == pytest.approx(quantile(ttft, 0.5), rel=0.15)
        assert told.ttft_p99_s == pytest.approx(quantile(ttft, 0.99), rel=0.25)


@pytest.mark.long
def test_ranks_come_and_go(subtests, monkeypatch):
    monkeypatch.setattr(closed_loop, "SWINGS", 1)
    monkeypatch.setattr(closed_loop, "PERIOD_S", 150.0)
    asked, loop = closed_loop.requests(), Loop(every_s=30.0, window_s=60.0, start_s=20.0)
    assert closed_loop.requests() == asked and len({request.session for request in asked}) < len(asked)
    with subtests.test("ranks that are told to go end what they have, and new ones start late and empty"):
        sizes = iter((Size(5, 4), Size(1, 1), Size(2, 3), Size(1, 2)))
        row, scaled = run(asked, loop, lambda scaled: next(sizes), "told")
        assert len(scaled.jobs) == len(asked) and row["changes"] == 4
        used = {job.decode.id.rank for job in scaled.jobs}
        # Of four that started after the first, one or two came back for what had left.
        assert used == set(range(max(used) + 1)) and 4 <= max(used) < 8
        first_s = min(job.request.arrival_s for job in scaled.jobs if job.decode.id.rank == 2)
        assert first_s >= 30.0 + 20.0
        # From 0 s to 30 s 3 + 2, then 5 + 4, 1 + 1, 2 + 3 and 1 + 2, beside what leaves.
        assert row["rank_hours"] * 3600 >= 30 * (5 + 9 + 2 + 5 + 3) - 10
    with subtests.test("the plan sees what a router would, and follows it"):
        told: list[str] = []
        row, scaled = run(asked, loop, follower(loop, told.append), "follows")
        assert len(told) == 4 and row["changes"]
        seen = observed(scaled.jobs[0], scaled.now)
        assert seen.is_over and seen.ttft_s >= seen.queue_s + seen.compute_s + seen.transfer_s
