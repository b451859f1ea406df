from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.transfer_plan import PageMove, delta_bytes, merge_moves, pages_covering, pages_of, runs_of
from services.values.errors import ProtocolError
from services.values.kv import KvLayout, PageRun

# Few pages, so that neighbours are common on one side, on both and on none.
PAGES = st.lists(st.integers(0, 6), max_size=12)
PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


def page_by_page(moves):
    return [
        (move.source_page + offset, move.target_page + offset)
        for move in moves
        for offset in range(move.num_pages)
    ]


@given(PAIRS)
def test_merged_moves_are_the_same_pages_in_as_few_pieces_as_can_be(pairs):
    moves = merge_moves([source for source, _ in pairs], [target for _, target in pairs])
    assert page_by_page(moves) == pairs
    breaks = sum((after[0] - before[0], after[1] - before[1]) != (1, 1) for before, after in pairwise(pairs))
    assert len(moves) == breaks + bool(pairs)


def test_merging_needs_neighbours_on_both_sides():
    assert merge_moves([4, 5, 6, 7], [0, 1, 8, 9]) == [PageMove(4, 0, 2), PageMove(6, 8, 2)]


def test_moves_need_as_many_targets_as_sources():
    with pytest.raises(ProtocolError, match="2 pages cannot go to 1"):
        merge_moves([1, 2], [3])


@given(PAGES)
def test_runs_say_the_same_pages_in_the_same_order(pages):
    runs = runs_of(pages)
    assert pages_of(runs) == pages
    assert all(run.end != following.first_page for run, following in pairwise(runs))


def test_runs_keep_token_order():
    assert runs_of([7, 8, 2, 3, 4]) == (PageRun(7, 2), PageRun(2, 3))


@given(st.integers(0, 5), st.integers(0, 30), st.integers(1, 5))
def test_pages_covering_against_token_by_token(first_page, num_tokens, page_size):
    start = first_page * page_size
    expected = sorted({token // page_size for token in range(start, start + num_tokens)})
    assert list(pages_covering(start, start + num_tokens, page_size)) == expected


@pytest.mark.parametrize("start, end", [(3, 8), (4, 2), (-4, 0)])
def test_pages_covering_refuses(start, end):
    with pytest.raises(ProtocolError):
        pages_covering(start, end, 4)


@pytest.mark.parametrize("prefix, prompt, pages", [(0, 9, 3), (8, 9, 1), (8, 8, 0), (4, 12, 2)])
def test_delta_bytes_counts_whole_pages(prefix, prompt, pages):
    layout = KvLayout(page_size=4, page_bytes=100, model_fingerprint=1)
    assert delta_bytes(prefix, prompt, layout) == pages * 100
