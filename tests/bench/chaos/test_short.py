"""One wave of faults on real processes, with the engine that starts soonest."""

import pytest

from bench.chaos.run import Settings, judged_run
from bench.chaos.verdict import summary, verdicts

# Slow: a wave takes 30 s, and who was stopped last may stand still for another 40.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_wave_of_kills_and_stops_costs_no_answer(tmp_path):
    run = await judged_run(Settings(0.1, seed=3, engine="fake", transport="local"), tmp_path, None, print)
    assert [row for row in verdicts(summary(run)) if not row["met"]] == [], "\n".join(run.sentences())
    assert all(answer.tokens or answer.asked.cancel_after is not None for answer in run.answers)
