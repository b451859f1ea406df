"""Who is let in, by what he would wait."""

import math

import pytest

from services.router.placement.admission import allowed_wait_s, refusal


@pytest.mark.parametrize(
    ("remaining_s", "allowed_s"), [(math.inf, 30.0), (100.0, 30.0), (60.0, 30.0), (10.0, 5.0), (0.0, 0.0)]
)
def test_half_of_the_time_may_be_waited_and_never_longer_than_the_setting(remaining_s, allowed_s):
    assert allowed_wait_s(30.0, remaining_s) == allowed_s


def test_a_refusal_says_when_to_come_again():
    error = refusal(12.25, 5.0)
    assert error.retry_after_s == 7.25
    assert "would wait 12.2 s for its turn, 5.0 s at most are allowed; try again in 7 s" in str(error)
    assert refusal(5.1, 5.0).retry_after_s == 1.0  # not at once, with everybody else
