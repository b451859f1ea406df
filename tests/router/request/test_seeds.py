from hypothesis import given
from hypothesis import strategies as st

from services.router.request.client_request import seed_of


def test_they_are_splitmix64s_and_the_first_is_the_requests_own():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of seed 0
    assert [seed_of(0, index) for index in range(4)] == [0, *published]
    assert seed_of(7, 0) == 7


@given(st.integers(0, 2**64 - 1))
def test_no_two_of_a_request_are_the_same(seed):
    seeds = [seed_of(seed, index) for index in range(1, 128)]
    assert len(set(seeds)) == 127
    assert all(0 <= each < 2**64 for each in seeds)
