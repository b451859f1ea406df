"""These tests show what a rank's word is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.ranks.learned import Pace, Trust
from services.values.rank import RankKey

RANK, OTHER = RankKey("decode", 0), RankKey("decode", 1)
PROMPT = 10_000


def after(*delivered: int) -> Trust:
    trust = Trust()
    for tokens in delivered:
        trust.observe(RANK, PROMPT, tokens, 0.0)
    return trust


def test_a_rank_is_trusted_until_it_breaks_its_word():
    trust = after(0)
    assert trust.of(RANK, 0.0) == pytest.approx(0.45, abs=0.01)
    assert trust.of(OTHER, 0.0) == 1.0
    assert trust.worth(RANK, 1_000, 0.0) == int(trust.of(RANK, 0.0) * 1_000)
    assert trust.worth(OTHER, 1_000, 0.0) == 1_000


def test_what_a_word_is_worth(subtests):
    with subtests.test("one that never delivers is worth next to nothing"):
        assert after(*[0] * 50).of(RANK, 0.0) < 0.05
    with subtests.test("half of what was promised is half the trust"):
        assert after(*[PROMPT // 2] * 100).of(RANK, 0.0) == pytest.approx(0.5, abs=0.05)
    with subtests.test("keeping its word restores it"):
        assert after(*[0] * 10, *[PROMPT] * 100).worth(RANK, 1_000, 0.0) == 1_000
    with subtests.test("small differences count for nothing"):
        assert after(*[PROMPT - 300] * 100).worth(RANK, 1_000, 0.0) == 1_000
    with subtests.test("distrust fades"):
        trust = after(*[0] * 50)
        assert trust.of(RANK, 60.0) == pytest.approx(0.5, abs=0.05)
        assert trust.of(RANK, 600.0) > 0.99
    with subtests.test("no prediction is no evidence"):
        trust = Trust()
        trust.observe(RANK, 0, 0, 0.0)
        assert trust.of(RANK, 0.0) == 1.0
    with subtests.test("a new incarnation begins anew"):
        trust = after(0)
        trust.forget(RANK)
        assert trust.of(RANK, 0.0) == 1.0


seen = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e4))


@given(st.lists(seen, max_size=20), st.integers(0, 10**6), st.floats(0, 1e5))
def test_it_stays_between_nothing_and_everything(seen, tokens, later_s):
    trust, now = Trust(), 0.0
    for predicted, delivered, passed_s in seen:
        now += passed_s
        trust.observe(RANK, predicted, delivered, now)
    assert 0 <= trust.of(RANK, now + later_s) <= 1
    assert 0 <= trust.worth(RANK, tokens, now + later_s) <= tokens


def pace_after(*requests: tuple[float, float]) -> float:
    pace = Pace()
    for expected_s, took_s in requests:
        pace.observe(RANK, expected_s, took_s, 0.0)
    return pace.of(RANK, 0.0)


def test_a_pace_lasts_from_one_long_prompt_to_the_next():
    """They show it alone, and may be minutes apart."""
    pace, now = Pace(), 0.0
    for _ in range(6):
        pace.observe(RANK, 6.0, 12.0, now)
        now += 120
    assert 0.5 <= pace.of(RANK, now) < 0.7
    assert pace.of(RANK, now + 1_200) == 1.0


def test_one_request_that_stalled_says_little_of_a_ranks_pace(subtests):
    usual = [(1.0, 1.0)] * 30
    with subtests.test("among others"):
        assert pace_after(*usual, (1.0, 60.0)) == 1.0
    with subtests.test("and also the first one of a life"):
        assert pace_after((1.0, 60.0)) > 0.6 and pace_after((1.0, 60.0), *usual) == 1.0
    with subtests.test("but several do"):
        assert pace_after(*usual, *[(1.0, 60.0)] * 4) < 0.7
    with subtests.test("while one that took less than was reported counts in full"):
        assert pace_after((40.0, 20.0)) > 1.7
    for seconds in (1.0, 30.0):
        with subtests.test("and so does a rank that is slower than it reports", seconds=seconds):
            assert pace_after(*[(seconds / 2, seconds)] * 8) < 0.7
            assert pace_after(*[(seconds, seconds)] * 30, *[(seconds / 2, seconds)] * 20) < 0.75
