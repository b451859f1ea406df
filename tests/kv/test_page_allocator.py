from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.page_allocator import PageAllocator
from services.kv.transfer_plan import pages_of, runs_of
from services.values.errors import NoCapacity, ProtocolError

POOL = 24


def free_set(allocator):
    runs = list(allocator.free_runs())
    pages = pages_of(runs)
    assert allocator.free_pages == len(pages) == len(set(pages))
    assert all(run.end < following.first_page for run, following in pairwise(runs))
    return set(pages)


def longest_run(pages):
    return max((run.num_pages for run in runs_of(sorted(pages))), default=0)


@settings(max_examples=80)
@given(st.data())
def test_against_a_set(data):
    allocator, free, taken = PageAllocator(POOL), set(range(POOL)), []
    for _ in range(data.draw(st.integers(1, 25))):
        if taken and data.draw(st.booleans()):
            given_back = data.draw(st.lists(st.sampled_from(taken), unique=True))
            allocator.free(given_back)
            free.update(given_back)
            taken = [page for page in taken if page not in given_back]
        else:
            wanted = data.draw(st.integers(0, 9))
            if wanted > len(free):
                with pytest.raises(NoCapacity):
                    allocator.allocate(wanted)
                continue
            pages = allocator.allocate(wanted)
            assert len(pages) == len(set(pages)) == wanted and free.issuperset(pages)
            # One contiguous run where there is one, else at least the longest there is.
            assert longest_run(pages) == min(wanted, longest_run(free))
            free.difference_update(pages)
            taken += pages
        assert free_set(allocator) == free


def test_prefers_the_shortest_run_that_fits_so_that_long_ones_last():
    allocator = PageAllocator(10)
    allocator.allocate(10)
    allocator.free([0, 1, 2, 3, 4, 6, 7, 9])
    assert allocator.allocate(2) == [6, 7]
    assert allocator.allocate(1) == [9]
    assert allocator.allocate(5) == [0, 1, 2, 3, 4]


def test_takes_the_longest_runs_when_none_fits():
    allocator = PageAllocator(10)
    allocator.allocate(10)
    allocator.free([0, 2, 3, 5, 6, 7, 9])
    assert allocator.allocate(6) == [5, 6, 7, 2, 3, 0]


@pytest.mark.parametrize("pages", [[3], [0, 0], [0, 3], [0, -1], [0, 4], [1, 0, 1]])
def test_a_wrong_free_changes_nothing(pages):
    allocator = PageAllocator(4)
    allocator.allocate(3)
    with pytest.raises(ProtocolError):
        allocator.free(pages)
    assert free_set(allocator) == {3}
    allocator.free([0, 1, 2])
    assert free_set(allocator) == {0, 1, 2, 3}


def test_nothing_is_allocated_or_freed_for_nothing():
    allocator = PageAllocator(2)
    assert allocator.allocate(0) == []
    allocator.free([])
    with pytest.raises(ProtocolError):
        allocator.allocate(-1)
    assert allocator.free_pages == 2
