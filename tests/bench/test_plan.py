"""What bench.plan counts; in its loop ranks come and go, and no request is lost."""

from types import SimpleNamespace

import pytest

from bench import closed_loop
from bench.closed_loop import Loop, Size, follower, observed, run
from bench.plan import measured, spread


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
