import pytest

from services.index.flush_pace import FlushPace


def test_the_budget_is_shared_by_all_ranks() -> None:
    pace = FlushPace(flush_s=0.05, writes_per_s=2000.0)
    assert pace.interval_s == 0.05
    pace.num_ranks = 1000
    assert pace.interval_s == 0.5
    assert pace.num_ranks / pace.interval_s == 2000.0


@pytest.mark.parametrize(("took_s", "interval_s"), [(0.01, 0.05), (0.2, 0.2), (60.0, 1.0)])
def test_a_slow_etcd_is_left_alone_for_as_long_as_it_took(took_s: float, interval_s: float) -> None:
    pace = FlushPace(flush_s=0.05, writes_per_s=2000.0)
    pace.wrote(took_s)
    assert pace.interval_s == interval_s
    pace.wrote(0.001)
    assert pace.interval_s == 0.05
