import pytest

from services.index.flush_pace import FlushPace


def paced(num_ranks: int = 1) -> FlushPace:
    pace = FlushPace(flush_s=0.05, writes_per_s=2000.0)
    pace.num_ranks = num_ranks
    return pace


def test_the_budget_is_shared_by_all_ranks() -> None:
    pace = paced()
    assert pace.interval_s == 0.05
    pace.num_ranks = 1000
    assert pace.interval_s == 0.5
    assert pace.num_ranks / pace.interval_s == 2000.0


def test_what_happens_seldom_is_told_as_soon_as_it_is_gathered() -> None:
    pace = paced(1000)
    assert pace.wait_s(0.0, 0.0) == 0.05
    pace.wrote(1.0, 0.01)
    assert pace.wait_s(1.0, 0.0) == 0.5
    assert pace.wait_s(1.2, 60.0) == pytest.approx(0.3)
    assert pace.wait_s(10.0, 0.0) == 0.05
    assert pace.wait_s(10.0, 0.04) == pytest.approx(0.01)
    assert pace.wait_s(10.0, 3.0) == 0.0


@pytest.mark.parametrize(("took_s", "interval_s"), [(0.01, 0.05), (0.2, 0.2), (60.0, 1.0)])
def test_a_slow_etcd_is_left_alone_for_as_long_as_it_took(took_s: float, interval_s: float) -> None:
    pace = paced()
    pace.wrote(0.0, took_s)
    assert pace.interval_s == pytest.approx(pace.wait_s(0.0, 60.0)) == interval_s
    pace.wrote(1.0, 0.001)
    assert pace.interval_s == pytest.approx(pace.wait_s(1.0, 60.0)) == 0.05


def test_a_write_that_failed_counts() -> None:
    pace = paced(1000)
    pace.tries(0.0)
    assert pace.wait_s(0.1, 60.0) == pytest.approx(0.4)


def test_those_that_begin_together_are_scattered() -> None:
    pace = paced(1000)
    pace.scatter(10.0, 0.5)
    assert pace.wait_s(10.0, 60.0) == pytest.approx(0.25)
    pace.scatter(10.0, 0.0)
    assert pace.wait_s(10.0, 60.0) == pytest.approx(0.25)
