"""How often drafts are right, by what became of them."""

import pytest

from services.engine.paged.drafts.acceptance import Acceptance, count_right

KIND = ("lookup", 5)


@pytest.mark.parametrize(
    ("guess", "actual", "right", "tried"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1, 2, 3], [1, 2, 9, 4], 2, 3),
        ([1, 2, 3], [9, 2, 3, 4], 0, 1),  # the others say nothing
        ([1, 2, 3], [1], 1, 1),
        ([1, 2, 3], [], 0, 0),
    ],
)
def test_a_guess_tells_as_far_as_it_was_right_and_once_that_it_was_not(guess, actual, right, tried):
    assert count_right(guess, actual) == (right, tried)


def test_a_sequence_is_like_the_others_until_it_is_known():
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


def test_what_has_changed_is_believed_soon():
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
