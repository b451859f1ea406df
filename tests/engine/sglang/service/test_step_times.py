"""SGLang's running totals as the time of a step."""

import pytest

from services.engine.sglang.service.step_times import MeanStepTimes
from services.values.step_histogram import StepHistogram


def totals(steps, total_us):
    return [float(steps), 99.0, float(total_us), 1.0, 1.0, 1.0]


def test_steps_of_running_totals(subtests):
    with subtests.test("before the first step nothing is known"):
        times = MeanStepTimes()
        times.note(0, None)
        assert times.step_s(0) == 0.0
    with subtests.test("the first steps are the average and later ones move it"):
        times = MeanStepTimes()
        times.note(1, totals(10, 50_000))
        assert times.step_s(1) == pytest.approx(0.005)
        times.note(1, totals(20, 200_000))  # 15 ms each
        assert times.step_s(1) == pytest.approx(0.005 + 0.2 * 0.010)
        assert times.step_s(0) == 0.0
    with subtests.test("a rank that rests keeps its average"):
        times = MeanStepTimes()
        for _ in range(3):
            times.note(0, totals(10, 50_000))
        assert times.step_s(0) == pytest.approx(0.005)
    with subtests.test("steps are counted by the mean of those between two looks"):
        times = MeanStepTimes()
        times.note(0, totals(10, 50_000))
        times.note(0, totals(10, 50_000))
        times.note(0, totals(14, 250_000))  # 50 ms each
        assert times.histogram(0) == StepHistogram().with_steps(0.005, 10).with_steps(0.05, 4)
        assert times.histogram(1) == StepHistogram()
