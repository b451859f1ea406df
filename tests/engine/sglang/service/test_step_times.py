"""SGLang's running totals as the time of a step."""

import pytest

from services.engine.sglang.service.step_times import MeanStepTimes
from services.values.step_histogram import StepHistogram


def totals(steps, total_us):
    return [float(steps), 99.0, float(total_us), 1.0, 1.0, 1.0]


def test_before_the_first_step_nothing_is_known():
    times = MeanStepTimes()
    times.note(0, None)
    assert times.step_s(0) == 0.0


def test_the_first_steps_are_the_average_and_later_ones_move_it():
    times = MeanStepTimes()
    times.note(1, totals(10, 50_000))
    assert times.step_s(1) == pytest.approx(0.005)
    times.note(1, totals(20, 200_000))  # 15 ms each
    assert times.step_s(1) == pytest.approx(0.005 + 0.2 * 0.010)
    assert times.step_s(0) == 0.0


def test_a_rank_that_rests_keeps_its_average():
    times = MeanStepTimes()
    for _ in range(3):
        times.note(0, totals(10, 50_000))
    assert times.step_s(0) == pytest.approx(0.005)


def test_steps_are_counted_by_the_mean_of_those_between_two_looks():
    times = MeanStepTimes()
    times.note(0, totals(10, 50_000))
    times.note(0, totals(10, 50_000))
    times.note(0, totals(14, 250_000))  # 50 ms each
    assert times.histogram(0) == StepHistogram().with_steps(0.005, 10).with_steps(0.05, 4)
    assert times.histogram(1) == StepHistogram()
