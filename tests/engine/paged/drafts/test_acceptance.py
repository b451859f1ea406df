"""These tests show how often drafts are right, by what became of them."""

import pytest

from services.engine.paged.draft_chances import Acceptance, count_right

KIND = ("lookup", 5)


def test_what_becomes_of_drafts_is_counted_and_believed(subtests):
    for guess, actual, right, tried in [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1, 2, 3], [1, 2, 9, 4], 2, 3),
        ([1, 2, 3], [9, 2, 3, 4], 0, 1),  # the others say nothing
        ([1, 2, 3], [1], 1, 1),
        ([1, 2, 3], [], 0, 0),
    ]:
        with subtests.test(guess=guess, actual=actual, right=right, tried=tried):
            assert count_right(guess, actual) == (right, tried)

    with subtests.test("a sequence is like the others until it is known"):
        rank = Acceptance()
        for _ in range(200):
            Acceptance(rank).note(KIND, 9, 10)
        assert rank.chance(KIND) == pytest.approx(0.9, abs=0.01)
        seq = Acceptance(rank)
        assert seq.chance(KIND) == rank.chance(KIND)
        for _ in range(6):
            seq.note(KIND, 0, 1)
        assert seq.chance(KIND) < 0.2
        assert rank.chance(KIND) > 0.8
        assert rank.chance(("lookup", 2)) == 0.5

    with subtests.test("what has changed is believed soon"):
        seq = Acceptance(Acceptance())
        for _ in range(200):
            seq.note(KIND, 0, 1)
        assert seq.chance(KIND) < 0.05
        for _ in range(10):
            seq.note(KIND, 1, 1)
        assert seq.chance(KIND) > 0.35
        for _ in range(5):
            seq.note(KIND, 5, 5)
        assert seq.chance(KIND) > 0.7
