"""These tests show what is carried to a position, against a walk over all tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.tails import carried_bytes, most_units, tail_pages, tail_start, units_at
from services.values.kv import GroupKind, KvGroup, KvLayout

kinds = st.sampled_from([GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW])
windows = st.integers(1, 70)
page_sizes = st.sampled_from([1, 4, 16])
positions = st.integers(0, 200)


def group(kind, window=0, unit_bytes=10):
    return KvGroup(kind, (0,), 1, 8, "float32", window=window, unit_bytes=unit_bytes)


def sees(kind, window, position, token):
    if kind is GroupKind.SLIDING_WINDOW:
        return position - window < token <= position
    return token <= position and token // window == position // window


@given(kinds, windows, page_sizes, positions)
def test_a_tail_is_the_pages_of_what_the_next_token_sees(kind, window, page_size, position):
    windowed = group(kind, window)
    seen = [token for token in range(position) if sees(kind, window, position, token)]
    pages = tail_pages(windowed, position, page_size)
    assert list(pages) == sorted({token // page_size for token in seen})
    assert units_at(windowed, position, page_size) == len(pages)
    assert tail_start(windowed, position, page_size) == (pages.start * page_size if pages else position)


@given(kinds, windows, page_sizes, positions, st.integers(1, 50))
def test_no_chunk_needs_more_pages_than_the_most(kind, window, page_size, position, chunk):
    windowed = group(kind, window)
    first = tail_start(windowed, position, page_size) // page_size
    end = -(-(position + chunk) // page_size)
    assert end - first <= most_units(windowed, page_size, chunk)


@given(page_sizes, positions)
def test_a_state_is_one_slot_wherever_it_is(page_size, position):
    state = group(GroupKind.RECURRENT)
    assert units_at(state, position, page_size) == 1 == most_units(state, page_size, 99)
    assert tail_start(state, position, page_size) == position


@pytest.mark.parametrize(("position", "pages"), [(1, 1), (16, 1), (17, 2), (40, 2), (48, 2), (49, 3)])
def test_carried_bytes_are_those_of_all_groups(position, pages):
    full = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32")
    carried = (group(GroupKind.SLIDING_WINDOW, 25, 100), group(GroupKind.RECURRENT, unit_bytes=7))
    layout = KvLayout(16, 1 << 10, 1, groups=(full, *carried))
    assert carried_bytes(layout, position) == 100 * pages + 7
    assert carried_bytes(KvLayout(16, 1 << 10, 1, groups=(full,)), position) == 0
