"""These tests show who comes in next: values in, a decision out."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.admitting import Newcomer, Patience, next_admission

PLAIN = Newcomer(new_pages=4, unheld_pages=0, shares=False, overtaken=0, overtaken_for_s=0.0)
PATIENCE = Patience(overtakes=3, wait_s=5.0)


def chosen(queue, room):
    return next_admission(queue, lambda index: queue[index].num_pages <= room, PATIENCE)


def test_who_comes_in_next(subtests):
    with subtests.test("the first comes in first"):
        assert chosen([PLAIN, PLAIN], room=4) == 0

    with subtests.test("a small one comes in before one that does not fit"):
        assert chosen([replace(PLAIN, new_pages=9), PLAIN], room=4) == 1

    with subtests.test("one whose prefix is held comes in before one whose is not"):
        assert chosen([PLAIN, replace(PLAIN, shares=True)], room=4) == 1

    with subtests.test("pages that cease to be evictable count"):
        assert chosen([replace(PLAIN, unheld_pages=1)], room=4) is None

    with subtests.test("nobody overtakes one whose patience is at its end"):
        sharing = replace(PLAIN, shares=True)
        for tired in (replace(PLAIN, overtaken=3), replace(PLAIN, overtaken_for_s=5.0)):
            assert chosen([tired, sharing], room=4) == 0
            assert chosen([replace(tired, new_pages=9), sharing], room=4) is None
            assert chosen([PLAIN, replace(tired, new_pages=9), sharing], room=4) == 0


ARRIVALS = st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=60)


@given(ARRIVALS, st.integers(0, 5), st.integers(1, 40), st.integers(1, 4))
def test_nobody_is_overtaken_more_often_than_allowed(arrivals, overtakes, window, per_round):
    """With newcomers all the time, of which any number may be preferred: everyone comes in before long."""
    room, patience = 8, Patience(overtakes, 1e9, window)
    queue, arriving, rounds = [], list(arrivals), 0
    while queue or arriving:
        queue += [[pages, shares, 0] for pages, shares in arriving[:per_round]]
        del arriving[:per_round]
        free = room  # those of the last round have ended
        while True:
            weighed = [Newcomer(pages, 0, shares, passed, 0.0) for pages, shares, passed in queue[:window]]
            index = next_admission(weighed, lambda i, w=weighed, f=free: w[i].num_pages <= f, patience)
            if index is None:
                break
            free -= queue[index][0]
            for passed in queue[:index]:
                passed[2] += 1
                assert passed[2] <= overtakes
            del queue[index]
        rounds += 1
        assert rounds <= 2 * len(arrivals)
