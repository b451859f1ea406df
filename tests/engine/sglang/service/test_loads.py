"""These tests show what routers are told of a DP rank, from what SGLang tells."""

import pytest

from services.engine.sglang.service import scheduler_reports
from services.engine.sglang.service.scheduler_reports import MeanStepTimes
from services.values.rank import Role
from services.values.rank_reports import StepHistogram

PAGE = 16
DECODE = {
    "max_total_num_tokens": 1024,
    "num_running_reqs": 3,
    # 2 without pages, 1 that has been retracted, 4 whose prompt prefill computes, 1 that has just landed
    "num_waiting_reqs": 8,
    "num_used_tokens": 500,
    "num_total_tokens": 500 + 70,
    "num_waiting_uncached_tokens": 0,  # always, on decode
    "disaggregation": {
        "decode_prealloc_queue_reqs": 2,
        "decode_transfer_queue_reqs": 4,
        "decode_retracted_queue_reqs": 1,
    },
}
PREFILL = {
    "max_total_num_tokens": 1024,
    "num_running_reqs": 1,
    "num_waiting_reqs": 2,
    "num_waiting_uncached_tokens": 90,
    "num_used_tokens": 17,
    "num_total_tokens": 17 + 120,
    "total_prefill_uncached_tokens": 3000,
    "total_prefill_busy_us": 1_500_000,
    "disaggregation": {"prefill_bootstrap_queue_reqs": 1},
}


def told(load, role, pool_pages=99):
    return scheduler_reports.rank_load(load, role, PAGE, pool_pages)


def test_loads_of_both_roles(subtests):
    with subtests.test("on decode only who has no pages waits"):
        load = told(DECODE, Role.DECODE)
        assert (load.waiting, load.running) == (3, 3 + 5)
        assert (load.waiting_tokens, load.pending_tokens) == (70, 0)
    with subtests.test("on prefill what waits is to be computed"):
        load = told(PREFILL, Role.PREFILL)
        assert (load.waiting, load.running) == (2, 1)
        assert load.waiting_tokens == load.pending_tokens == 90
        assert load.prefill_tokens_per_s == 2000
    with subtests.test("the books are in pages"):
        books = told(PREFILL, Role.PREFILL).books
        assert (books.total, books.free, books.private) == (64, 62, 2)
    with subtests.test("before its first report a rank is empty and as large as asked for"):
        # SGLang answers zeros until then.
        for load in ({}, {"max_total_num_tokens": 0, "num_used_tokens": 0}):
            empty = told(load, Role.DECODE)
            assert (empty.books.total, empty.books.free, empty.waiting, empty.running) == (99, 99, 0, 0)
            assert scheduler_reports.num_pages(load, PAGE) == 0


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
