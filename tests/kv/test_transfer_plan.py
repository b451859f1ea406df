from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.transfer_plan import (
    PageMove,
    carried_by_kind,
    merge_moves,
    moved_bytes,
    pages_covering,
    pages_of,
    runs_of,
)
from services.values.errors import ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout, PageRun

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


def test_merged_moves_stay_in_their_group():
    assert merge_moves([4, 5, 7], [0, 1, 9], group=2) == [PageMove(4, 0, 2, 2), PageMove(7, 9, 1, 2)]


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
    assert moved_bytes(prefix, prompt, layout) == (pages * 100,)


def group(kind, window=0, unit_bytes=0):
    return KvGroup(kind, (0,), 1, 8, "float32", window=window, unit_bytes=unit_bytes)


HYBRID = KvLayout(
    page_size=4,
    page_bytes=100,
    model_fingerprint=1,
    groups=(
        group(GroupKind.FULL_ATTENTION),
        group(GroupKind.SLIDING_WINDOW, 6, 10),
        group(GroupKind.CHUNKED_WINDOW, 8, 7),
        group(GroupKind.RECURRENT, 0, 5000),
        group(GroupKind.SLIDING_WINDOW, 2, 1),
    ),
)


@pytest.mark.parametrize(
    ("prefix", "prompt", "moved"),
    [
        # The next token sees, of the windows of 6 and 2, tokens [p - 5, p) and [p - 1, p).
        (0, 14, (400, 20, 14, 5000, 1)),  # pages 2-3, 2-3 of the chunk from 8 on, page 3
        (12, 14, (100, 20, 14, 5000, 1)),
        (16, 16, (0, 20, 0, 5000, 1)),  # a full hit; the next token begins a chunk
        (0, 1, (100, 10, 7, 5000, 1)),
        (0, 17, (500, 20, 7, 5000, 1)),
    ],
)
def test_what_is_carried_does_not_depend_on_what_decode_has(prefix, prompt, moved):
    assert moved_bytes(prefix, prompt, HYBRID) == moved


def test_what_is_carried_is_told_by_kind():
    assert carried_by_kind(HYBRID, (400, 20, 0, 5000, 1)) == {"sliding_window": 21, "recurrent": 5000}
    assert carried_by_kind(HYBRID, (0,) * 5) == {}
    plain = KvLayout(page_size=4, page_bytes=100, model_fingerprint=1)
    assert moved_bytes(4, 14, plain) == (300,)
    assert carried_by_kind(plain, (300,)) == {}
