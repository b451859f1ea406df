from hypothesis import given
from hypothesis import strategies as st

from services.index.records import Staleness


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 9)), max_size=40), st.floats(0, 5))
def test_it_is_the_greatest_age_of_the_window(told: list[tuple[float, float]], later_s: float) -> None:
    staleness, now, all_told = Staleness(window_s=4.0), 100.0, []
    for pause_s, age_s in told:
        now += pause_s
        staleness.reported(age_s, now)
        all_told.append((now, age_s))
    now += later_s
    expected = max((age_s for at, age_s in all_told if at >= now - 4.0), default=0.0)
    assert staleness.age_s(now) == expected
