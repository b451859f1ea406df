"""These tests show how fast a queue gets shorter, beside a count over all that happened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.admitting import _ENOUGH, _SAMPLES, QueueRate


def test_it_is_not_known_before_some_came_in():
    rate = QueueRate()
    rate.taken(0.5)  # nobody was known to wait
    rate.waits(1.0)
    for second in range(1, _ENOUGH):
        rate.taken(1.0 + second)
        assert rate.per_s(1.0 + second) == 0.0
    rate.taken(1.0 + _ENOUGH)
    assert rate.per_s(1.0 + _ENOUGH) == pytest.approx(1.0)
    assert rate.per_s(1.0 + 4 * _ENOUGH) == pytest.approx(0.25)  # nobody came in since
    rate.empty()
    assert rate.per_s(100.0) == 0.0


events = st.lists(
    st.tuples(
        st.sampled_from(["waits", "taken", "taken", "taken", "came_back", "empty"]), st.floats(0.01, 5.0)
    ),
    max_size=200,
)


@given(events)
def test_it_is_what_came_in_over_the_time_in_which_somebody_waited(story):
    rate, now, since, taken, back = QueueRate(), 0.0, None, [], 0
    for event, pause in story:
        now += pause
        if event == "waits":
            rate.waits(now)
            since = now if since is None else since
        elif event == "taken":
            rate.taken(now)
            taken += [now] if since is not None and not back else []
            back = max(0, back - 1)
        elif event == "came_back":
            rate.came_back()
            back += 1
        else:
            rate.empty()
            since, taken, back = None, [], 0
        began = taken[-_SAMPLES - 1] if len(taken) > _SAMPLES else since
        recent = taken[-_SAMPLES:]
        expected = len(recent) / (now + 0.5 - began) if len(recent) >= _ENOUGH else 0.0
        assert rate.per_s(now + 0.5) == pytest.approx(expected)
