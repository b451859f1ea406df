"""These tests show which ranks are whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.ranks.rank_order import Share


@given(st.integers(0, 40), st.integers(1, 12))
def test_every_rank_is_somebodys_and_all_have_about_as_many(num_ranks, routers):
    shares = [Share(index, routers).own(range(num_ranks)) for index in range(routers)]
    assert set().union(*shares) == set(range(num_ranks))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if num_ranks >= routers:
        assert sum(sizes) == num_ranks
    elif num_ranks:
        assert min(sizes) == 1


def test_a_place_that_there_is_not(subtests):
    for place in [(-1, 2), (2, 2), (0, 0)]:
        with subtests.test(place=place), pytest.raises(ValueError, match="no share"):
            Share(*place)
