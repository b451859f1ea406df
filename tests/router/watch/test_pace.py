import pytest

from services.router.watch_cluster import WatchPace


def test_a_turn_is_followed_by_a_rest_that_makes_it_a_share():
    now = [10.0]
    pace = WatchPace(share=0.25, clock=lambda: now[0])
    assert pace.left_s <= 0
    with pace.turn():
        now[0] += 1.0
    assert pace.left_s == 3.0
    now[0] += 3.0
    assert pace.left_s == 0
    with pytest.raises(ValueError), pace.turn():
        now[0] += 2.0
        raise ValueError
    assert pace.left_s == 6.0
