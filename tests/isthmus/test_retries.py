"""These tests show when a failed call is tried again, and how long after."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from isthmus.retries import Attempts, Retries
from router.scripted_router import Pauses

chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 9), st.integers(1, 12), chances)
def test_pauses_double_up_to_the_longest(attempts, failed, chance):
    retries = Retries(attempts, first_s=0.5, longest_s=4)
    pause_s = retries.pause_s(failed, Unavailable(), chance)
    if failed >= attempts:
        assert pause_s is None
    else:
        whole_s = [0.5, 1, 2, 4, 4, 4, 4, 4][failed - 1]
        assert whole_s / 2 <= pause_s <= whole_s


@given(st.floats(0, 100), st.integers(1, 4), chances)
def test_what_the_router_asks_for_is_the_least(hint_s, failed, chance):
    pause_s = Retries().pause_s(failed, Overloaded("full", retry_after_s=hint_s), chance)
    assert hint_s <= pause_s <= hint_s + 10


@given(st.floats(0.1, 30), st.lists(chances, min_size=10, max_size=10))
def test_attempts_stay_within_the_time(timeout_s, chances):
    time, drawn = Pauses(), iter(chances)
    attempts = Attempts(Retries(attempts=8), timeout_s, time.clock, lambda: next(drawn))
    last = Unavailable("the last")
    left = [attempts.left_s()]
    with pytest.raises(Unavailable) as raised:
        while True:
            time.sleep(attempts.pause_s(last))
            left.append(attempts.left_s())
    assert raised.value is last
    assert time.now < 100.0 + timeout_s and all(after < before for before, after in pairwise(left))


def test_what_would_fail_or_come_too_late_is_not_tried(subtests):
    with subtests.test("nothing is sent when the time is over"):
        time = Pauses()
        attempts = Attempts(Retries(), 1.0, time.clock, lambda: 0.0)
        time.sleep(1.0)
        with pytest.raises(DeadlineExceeded):
            attempts.left_s()
        assert Attempts(Retries(), None, time.clock, lambda: 0.0).left_s() is None
    with subtests.test("what would fail again is not tried"):
        assert Retries().pause_s(1, InvalidRequest("max_tokens"), 0.5) is None
        assert Retries().pause_s(1, Overloaded("never", retry_after_s=float("inf")), 0.5) is None
    for wrong in [{"attempts": 0}, {"first_s": -1.0}, {"first_s": 3.0, "longest_s": 2.0}]:
        with subtests.test(wrong=wrong), pytest.raises(ValueError, match="attempts of 1 or more"):
            Retries(**wrong)
