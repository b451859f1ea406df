"""As prometheus_client's, told of each value as often as it came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from services.observe.prometheus import RepeatedHistogram

pytestmark = pytest.mark.long

BOUNDS = (0.25, 0.5, 1.0, 5.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 4.0, 5.0, 64.0]), st.integers(1, 9))))
def test_it_shows_what_each_time_by_itself_would(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    repeated = RepeatedHistogram("gap_seconds", "Of tokens.", BOUNDS, ours)
    each = Histogram("gap_seconds", "Of tokens.", buckets=BOUNDS, registry=theirs)
    for value, times in observed:
        repeated.observe(value, times)
        for _ in range(times):
            each.observe(value)
    assert samples(ours) == samples(theirs)


def samples(registry):
    (metric,) = registry.collect()
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }
    return metric.name, metric.documentation, metric.type, told
