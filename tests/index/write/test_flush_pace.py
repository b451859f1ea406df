from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.index.write.flush_pace import FlushPace


def paced(num_ranks: int = 1) -> FlushPace:
    pace = FlushPace(flush_s=0.05, writes_per_s=2000.0)
    pace.num_ranks = num_ranks
    return pace


def write(pace: FlushPace, now: float, took_s: float = 0.0) -> None:
    pace.tries(now)
    pace.wrote(now + took_s, took_s)


def test_when_a_rank_writes_next(subtests: pytest.Subtests) -> None:
    with subtests.test("the budget is shared by all ranks"):
        pace = paced()
        assert pace.interval_s == 0.05
        pace.num_ranks = 1000
        assert pace.interval_s == 0.5
        assert pace.num_ranks / pace.interval_s == 2000.0
    with subtests.test("what happens seldom is told as soon as it is gathered"):
        pace = paced(1000)
        assert pace.wait_s(0.0, 0.0) == 0.05
        write(pace, 1.0)
        assert pace.wait_s(1.0, 0.0) == 0.5
        assert pace.wait_s(1.2, 60.0) == pytest.approx(0.3)
        assert pace.wait_s(10.0, 0.0) == pytest.approx(0.05)
        assert pace.wait_s(10.0, 0.04) == pytest.approx(0.01)
        assert pace.wait_s(10.0, 3.0) == 0.0
    with subtests.test("writes begin an interval apart however long each takes"):
        pace = paced(1000)
        write(pace, 1.0, took_s=0.2)
        assert pace.wait_s(1.2, 60.0) == pytest.approx(0.3)
        assert pace.interval_s == 0.5
    for took_s, wait_s in [(0.01, 0.04), (0.2, 0.2), (60.0, 1.0)]:
        with subtests.test(took_s=took_s, wait_s=wait_s):
            pace = paced()
            write(pace, 0.0, took_s=took_s)
            assert pace.wait_s(took_s, 60.0) == pytest.approx(wait_s)
            assert pace.interval_s == pytest.approx(took_s + wait_s)
            write(pace, took_s + wait_s, took_s=0.001)
            assert pace.wait_s(took_s + wait_s + 0.001, 60.0) == pytest.approx(0.049)
            assert pace.interval_s == 0.05
    with subtests.test("a write that failed counts"):
        pace = paced(1000)
        pace.tries(0.0)
        assert pace.wait_s(0.1, 60.0) == pytest.approx(0.4)


def test_who_is_late_or_begins_with_others_keeps_a_beat_of_its_own(subtests: pytest.Subtests) -> None:
    for late_s, wait_s in [(0.0, 0.5), (0.1, 0.4), (0.24, 0.26), (0.26, 0.74), (0.6, 0.4), (60.1, 0.4)]:
        with subtests.test(late_s=late_s, wait_s=wait_s):
            pace = paced(1000)
            write(pace, 1.0)
            write(pace, 1.5 + late_s)
            assert pace.wait_s(1.5 + late_s, 60.0) == pytest.approx(wait_s)
    # They were held up together, or had news together after a quiet time.
    for now in [1.6, 60.1]:
        with subtests.test(now=now):
            paces = [paced(1000) for _ in range(5)]
            for number, pace in enumerate(paces):
                write(pace, 1.0 + number / 100)
                write(pace, now)
            next_s = [now + pace.wait_s(now, 60.0) for pace in paces]
            assert next_s == pytest.approx([now + 0.4 + number / 100 for number in range(5)])
    with subtests.test("those that begin together are scattered"):
        pace = paced(1000)
        pace.scatter(10.0, 0.5)
        assert pace.wait_s(10.0, 60.0) == pytest.approx(0.25)
        pace.scatter(10.0, 0.0)
        assert pace.wait_s(10.0, 60.0) == pytest.approx(0.25)


delays_s = st.floats(0.0, 3.0, allow_nan=False)


@given(st.integers(1, 3000), st.lists(st.tuples(delays_s, delays_s, st.booleans()), min_size=1))
def test_whatever_holds_it_up_no_rank_writes_more_than_its_share(
    num_ranks: int, writes: list[tuple[float, float, bool]]
) -> None:
    """`writes`: how late each begins and how long it takes, and whether news was waiting meanwhile."""
    pace, now, began_at = paced(num_ranks), 1000.0, []
    share_s = pace.interval_s
    for late_s, took_s, waiting in writes:
        now += pace.wait_s(now, 60.0 if waiting else 0.0) + late_s
        pace.tries(now)
        began_at.append(now)
        now += took_s
        pace.wrote(now, took_s)
    assert len(began_at) <= (began_at[-1] - began_at[0]) / share_s + 2
    assert all(later - earlier >= share_s / 2 - 1e-6 for earlier, later in pairwise(began_at))
