"""Steps by duration, against counting them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.values.rank_reports import EDGES_S, StepHistogram

steps = st.lists(st.tuples(st.one_of(st.floats(0, 100), st.sampled_from(EDGES_S)), st.integers(1, 5)))


@given(steps)
def test_as_counted_one_by_one(taken):
    histogram = StepHistogram()
    for took_s, count in taken:
        histogram = histogram.with_steps(took_s, count)
    for edge, counted in histogram.cumulative():
        assert counted == sum(count for took_s, count in taken if took_s <= float(edge))
    assert histogram.sum_s == pytest.approx(sum(took_s * count for took_s, count in taken))
