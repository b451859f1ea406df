import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.meter import Samples

pytestmark = pytest.mark.long

seconds = st.floats(0, 1e3)


@given(st.lists(seconds, min_size=1, max_size=40))
def test_figures_are_numpys(values):
    samples = Samples()
    for value in values:
        samples.add(value)
    expected = {
        "mean_x_ms": np.mean(values),
        "median_x_ms": np.median(values),
        "std_x_ms": np.std(values),
        **{f"p{percent}_x_ms": np.percentile(values, percent) for percent in (90, 95, 99)},
    }
    figures = samples.figures("x")
    assert set(figures) == set(expected) and samples.largest == max(values)
    for name, value in expected.items():
        assert figures[name] == pytest.approx(1e3 * value)


@given(st.lists(st.tuples(seconds, st.integers(1, 5)), max_size=20))
def test_a_value_may_come_several_times(pairs):
    one, each = Samples(), Samples()
    for value, times in pairs:
        one.add(value, times)
        for _ in range(times):
            each.add(value)
    assert one.figures("x") == pytest.approx(each.figures("x")) and one.count == each.count


def test_many_samples_and_none(subtests):
    with subtests.test("many are drawn from evenly"):
        samples = Samples(exact=1000)
        for value in range(50_000):
            samples.add(value)
        assert len(samples.values()) == 1000 and samples.count == 50_000
        assert samples.mean == pytest.approx(24_999.5) and samples.largest == 49_999
        assert samples.percentile(50) == pytest.approx(25_000, rel=0.1)
    with subtests.test("none"):
        assert set(Samples().figures("x").values()) == {0.0}
