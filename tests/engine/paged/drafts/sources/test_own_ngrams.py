"""These tests show what a sequence's own ids are guessed to go on with: against every place of them."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.draft_sources import LONGEST, OwnNgrams


def grown(ids, at_once=4):
    """As they come in, looking for a match each time."""
    seen = []
    own = OwnNgrams(seen)
    for first in range(0, len(ids), at_once):
        seen += ids[first : first + at_once]
        own.index(at_once)
        match = own.match(3)
    return match


def longest(ids):
    def common(at):
        return next((n for n in range(min(at, LONGEST)) if ids[at - 1 - n] != ids[-1 - n]), min(at, LONGEST))

    return max(map(common, range(len(ids))), default=0)


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), at_once=st.integers(1, 40))
def test_it_is_what_followed_where_most_of_the_end_stood(ids, at_once):
    match = grown(ids, at_once)
    length = longest(ids)
    assert (match is not None) == (length >= 3)
    if match is not None:
        assert match.length == length
        end = ids[-length:]
        # What stands there may end now: it is taken to go on as it began.
        periods = [(ids + list(match.ids))[at : at + length + 3] for at in range(len(ids) - length)]
        assert [*end, *match.ids] in periods


def test_which_place_is_followed(subtests):
    with subtests.test("of as long ones the latest"):
        assert list(grown([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3]).ids) == [6, 7, 8]

    with subtests.test("a place that was right is not lost among many"):
        many = [number for last in range(50, 90) for number in (0, 0, 0, last)]
        ids = [1, 2, 3, 4, 5, 0, 0, 0, 6, 7, *many, 1, 2, 3]
        own = OwnNgrams(ids)
        own.index(len(ids))
        assert list(own.match(3).ids) == [4, 5, 0]
        ids += [4, 5, 0, 0, 0]
        own.index(5)
        assert list(own.match(2).ids) == [6, 7]

    with subtests.test("what repeats goes on"):
        assert list(grown([7, 8] * 4, at_once=1).ids) == [7, 8, 7]
        assert list(grown([7] * 6).ids) == [7, 7, 7]

    for ids in [[], [1], [1, 1, 1], [1, 2, 3, 4, 5, 6]]:
        with subtests.test("nothing to find", ids=ids):
            assert grown(ids or [1]) is None

    with subtests.test("a long prompt is taken in by and by"):
        own = OwnNgrams([*range(1000)] * 2)
        assert [own.index(1500), own.backlog] == [1500, 500]
        assert own.match(3).ids == [0, 1, 2]  # of what is in; the end is where it always was
        assert [own.index(1500), own.index(1500), own.backlog] == [500, 0, 0]
