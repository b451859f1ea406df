from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.torch.attention.kernels.kernel_cases import steps
from engine.torch.attention.kernels.plain_plan import cut_plainly, pieces_plainly
from engine.torch.attention.paging import empty, reach_view_of
from services.engine.torch.attention.cpu_attention_kernel import PagePieces
from services.engine.torch.attention.page_pieces import Read, cut_pieces, outline_of, pieces_of, rows_of
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.attention.step_view import InPlace, read_of


def pool(num_kv_heads=8, page_size=16, dtype=torch.bfloat16):
    return empty(PageShape(1, num_kv_heads, page_size, 1, 1), dtype=dtype)


def read_by(step):
    """Make the pieces of what a step's single tokens read."""
    kv = pool(1, step.page_size)
    return reach_view_of(kv, step.chunks, InPlace(), step.reach).decode.reads


def of_sizes(sizes):
    """Each of so many pages and so many readers; a piece's readers are the first queries."""
    pages = sum(num_pages for num_pages, _ in sizes)
    readers = [query for _, num_readers in sizes for query in range(num_readers)]
    return PagePieces(
        np.arange(100, 100 + pages),
        np.zeros(pages, np.int64),
        np.full(pages, 16),
        np.cumsum([0, *(num_pages for num_pages, _ in sizes)]),
        np.array(readers),
        np.cumsum([0, *(num_readers for _, num_readers in sizes)]),
    )


@given(
    sizes=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=8),
    group=st.sampled_from([1, 2, 4, 7, 8, 96]),
    num_kv_heads=st.sampled_from([1, 8]),
    page_size=st.sampled_from([1, 16, 128]),
    num_programs=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_parts_are_all_of_the_pieces_and_nothing_twice(
    sizes, group, num_kv_heads, page_size, num_programs, dtype
):
    pieces = of_sizes(sizes)
    kv, num_heads = pool(num_kv_heads, page_size, dtype), group * num_kv_heads
    parts = cut_pieces(outline_of(pieces), kv, num_heads, num_programs)
    expected = [
        (page, reader)
        for i in range(len(sizes))
        for page in range(*pieces.page_starts[i : i + 2])
        for reader in range(*pieces.reader_starts[i : i + 2])
    ]
    table = parts.table.tolist()
    read = [
        (p, r) for first, end, start, stop, *_ in table for p in range(first, end) for r in range(start, stop)
    ]
    assert sorted(read) == expected
    narrow, wide = rows_of(kv, num_heads)
    rows = [(stop - start) * group for _, _, start, stop, *_ in table]
    assert all(n <= narrow for n in rows[: parts.num_narrow])
    assert all(narrow < n <= wide for n in rows[parts.num_narrow :])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=8),
    num_programs=st.integers(1, 300),
)
def test_each_query_joins_its_own_results_and_every_result_has_a_place(sizes, num_programs):
    pieces = of_sizes(sizes)
    parts = cut_pieces(outline_of(pieces), pool(), 32, num_programs)
    query_at = {
        first_output + i: pieces.readers[start + i]
        for _, _, start, stop, first_output, *_ in parts.table.tolist()
        for i in range(stop - start)
    }
    starts, readings = parts.joins.starts.tolist(), parts.joins.readings.tolist()
    assert sorted(readings) == sorted(query_at) == list(range(len(readings)))
    assert len(starts) == max(num_readers for _, num_readers in sizes) + 1
    for query, (start, end) in enumerate(pairwise(starts)):
        assert end > start
        assert all(query_at[reading] == query for reading in readings[start:end])


@given(step=steps(), num_programs=st.integers(1, 300), group=st.sampled_from([1, 16]))
def test_a_part_has_whole_pages_but_for_its_first_slot_and_its_last(step, num_programs, group):
    page_size = step.page_size
    pieces = read_by(step)
    parts = cut_pieces(outline_of(pieces), pool(1, page_size), group, num_programs)
    for first, end, _, _, _, first_slot, end_slot in parts.table.tolist():
        assert pieces.firsts[first:end].tolist() == [first_slot, *[0] * (end - first - 1)]
        assert pieces.ends[first:end].tolist() == [*[page_size] * (end - first - 1), end_slot]


@given(
    step=steps(),
    num_programs=st.integers(1, 300),
    group=st.sampled_from([1, 8, 16]),
    num_kv_heads=st.sampled_from([1, 8]),
)
def test_pieces_and_parts_are_those_of_numpy(step, num_programs, group, num_kv_heads):
    kv = pool(num_kv_heads, step.page_size)
    reads = [read_of(chunk, step.reach, step.page_size) for chunk in step.chunks]
    pieces, expected = pieces_of(reads, step.page_size), pieces_plainly(reads, step.page_size)
    for field, of_numpy in zip(pieces, expected, strict=True):
        assert field.dtype == np.int64
        assert field.flags.c_contiguous
        np.testing.assert_array_equal(field, of_numpy)
    parts = cut_pieces(outline_of(pieces), kv, group * num_kv_heads, num_programs)
    plain = cut_plainly(pieces, kv, group * num_kv_heads, num_programs)
    assert parts.num_narrow == plain.num_narrow
    for table, of_numpy in [(parts.table, plain.table), *zip(parts.joins, plain.joins, strict=True)]:
        np.testing.assert_array_equal(table, of_numpy)


def test_pages_in_other_places_are_read_apart():
    """A page of two windows, at two places, or still being filled is not read together."""
    reads = [
        Read([5, 6, 7], 0, 0, 12),
        Read([6, 5, 7], 0, 0, 11),
        Read([5, 6, 7], 0, 1, 11),
        Read([5, 6, 7], 1, 0, 12),
        Read([5, 6, 7, 8], 0, 0, 13),
    ]
    pieces, expected = pieces_of(reads, 4), pieces_plainly(reads, 4)
    for field, of_numpy in zip(pieces, expected, strict=True):
        np.testing.assert_array_equal(field, of_numpy)
    together = {
        tuple(pieces.readers[slice(*who)].tolist()): pieces.pages[slice(*where)].tolist()
        for who, where in zip(pairwise(pieces.reader_starts), pairwise(pieces.page_starts), strict=True)
        if who[1] - who[0] > 1
    }
    assert together == {(0, 4): [5], (0, 2, 4): [6, 7], (1, 3): [5]}


def test_a_table_that_changed_is_read_anew():
    tables = [list(range(start, start + 100)) for start in (0, 200)]
    for change in (
        lambda: None,
        lambda: None,
        lambda: tables[0].__setitem__(3, 777),
        lambda: tables[1].pop(),
    ):
        change()
        reads = [Read(pages, 0, 0, 4 * len(pages)) for pages in tables]
        for field, of_numpy in zip(pieces_of(reads, 4), pieces_plainly(reads, 4), strict=True):
            np.testing.assert_array_equal(field, of_numpy)


def test_parts_keep_programs_busy_and_read_pages_once(subtests):
    with subtests.test("a long context keeps every program busy and a short one is left whole"):
        long = cut_pieces(outline_of(of_sizes([(512, 1)])), pool(), 32, num_programs=264)
        assert 264 / 8 - 3 <= len(long.table) <= 264 / 8
        assert np.ptp(long.table[:, 1] - long.table[:, 0]) <= 1
        short = cut_pieces(outline_of(of_sizes([(8, 1)])), pool(), 32, num_programs=264)
        assert len(short.table) == 1
    for num_readers, num_parts in [(1, 1), (16, 1), (17, 2), (40, 3)]:
        with subtests.test(
            "pages are read once for as many readers as are multiplied at once", num_readers=num_readers
        ):
            parts = cut_pieces(outline_of(of_sizes([(4, num_readers)])), pool(), 32, num_programs=264)
            assert len(parts.table) == num_parts
