"""A token's attention on a CPU is a function of what it sees, to the bit: whoever else is in the step."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.torch.attention.reach_cases import NUM_LAYERS, Case, Made, attended, cases, chunk_of, made_of
from services.engine.torch.attention import cpu_attention_kernel, step_view
from services.engine.torch.attention.cpu_attention_kernel import PagePieces
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.step_view import IN_PLACE_DTYPES, InPlace, Reach


@pytest.fixture(scope="module")
def three_threads():
    with ThreadPoolExecutor(2) as executor:
        yield InPlace(3, executor)


def tokens_of(case):
    """Each of the step's tokens as a chunk of its own."""
    return [
        replace(chunk, token_ids=[0], start=position)
        for chunk in case.chunks
        for position in range(chunk.start, chunk.end)
    ]


def of_rows(case, made, chunks, rows):
    """These of the step's rows, computed as `chunks`; K and V are in the pages already."""
    own = Made(made.pool, made.query[:, :, rows], made.key[:, :, rows], made.value[:, :, rows], made.sinks)
    return attended(replace(case, chunks=tuple(chunks), stores=False), own, InPlace())


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=() if dtype == torch.float32 else pytest.mark.exact)
        for dtype in IN_PLACE_DTYPES
        if dtype.itemsize > 1
    ],
)
@given(data=st.data())
def test_a_token_gets_the_same_alone_and_beside_others(dtype, data, three_threads):
    """Others are of other sequences, with its prefix or without, or of its own, as a chunk or as drafts."""
    case = data.draw(cases(dtype=dtype))
    made = made_of(case)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_view, "_SHARE_BYTES", 1)
        together = attended(case, made, data.draw(st.sampled_from([InPlace(), three_threads])))
    tokens = tokens_of(case)
    alone = torch.cat([of_rows(case, made, [c], [row]) for row, c in enumerate(tokens)])
    assert torch.equal(together, alone)
    some = sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1), min_size=1)))
    assert torch.equal(of_rows(case, made, [tokens[row] for row in some], some), alone[some])


@pytest.mark.exact
@given(data=st.data())
def test_numbers_of_8_bits_are_read_as_the_numbers_they_are(data):
    """A pool of float32 that has what one of float8 has gives the same bits, and keeps the same."""
    case = data.draw(cases(dtype=torch.float32))
    made = made_of(case)
    narrow = PagedKv(made.pool.numbers.to(torch.float8_e4m3fn), made.pool.shape, torch.float32)
    wide = PagedKv(narrow.numbers.float(), made.pool.shape)
    rounded = [narrow.rounded(numbers).float() for numbers in (made.key, made.value)]
    outputs = [
        attended(case, Made(pool, made.query, *stored, made.sinks), InPlace())
        for pool, stored in ((narrow, (made.key, made.value)), (wide, rounded))
    ]
    assert torch.equal(*outputs)
    assert torch.equal(narrow.numbers.float().nan_to_num(), wide.numbers.nan_to_num())


def a_tree_of_readers():
    """Single tokens of 20 sequences with a prefix of 12 pages, 10 of them with 7 more."""
    page_size, chunks = 16, []
    for i in range(20):
        prefix = [*range(19 if i % 2 else 12)]
        own = [*range(20 + 4 * i, 24 + 4 * i)]
        start = len(prefix) * page_size + (1 + 23 * i) % 64
        chunks.append(chunk_of(start, 1, prefix + own, Reach(0), page_size))
    shape = PageShape(NUM_LAYERS, 2, page_size, 64, 64)
    return Case(shape, 100, Reach(0), tuple(chunks), 3, softcap=None, has_sinks=True)


def parted(case):
    """Tell whether any token of the step gets other bits alone."""
    made = made_of(case)
    together = attended(case, made, InPlace())
    alone = torch.cat([of_rows(case, made, [c], [row]) for row, c in enumerate(case.chunks)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
    return not torch.equal(together, alone)


def test_a_softmax_is_cut_by_no_reader(subtests):
    with subtests.test("many heads and long prefixes are the same too"):
        assert not parted(a_tree_of_readers())
    with (
        subtests.test("a softmax that is cut by who reads is noticed"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        # As it was: each piece by itself, joined by their log-sum-exps.
        attend = cpu_attention_kernel._attend_pieces

        def attend_and_join(query, numbers, shape, layer, cap, pieces, softmax, sinks, first, end):
            outputs = [[] for _ in query]  # of each query: what it gets of each piece, and its log-sum-exp
            for i, (page, end_page) in enumerate(pairwise(pieces.page_starts)):
                readers = pieces.readers[pieces.reader_starts[i] : pieces.reader_starts[i + 1]]
                own = PagePieces(
                    *(of_pages[page:end_page] for of_pages in pieces[:3]),
                    np.array([0, end_page - page]),
                    np.arange(len(readers)),
                    np.array([0, len(readers)]),
                )
                anew = type(softmax)(
                    *(np.zeros((len(readers), *part.shape[1:]), np.float32) for part in softmax)
                )
                anew.greatest.fill(cpu_attention_kernel._LOWEST)
                none = np.full_like(sinks, -np.inf)
                num_items = len(readers) * shape.num_kv_heads
                attend(query[readers], numbers, shape, layer, cap, own, anew, none, 0, num_items)
                for j, reader in enumerate(readers):
                    outputs[reader].append((anew.weighted[j], anew.greatest[j] + np.log(anew.totals[j])))
            for i, of_query in enumerate(outputs):
                log_sums = torch.tensor(np.stack([log_sum for _, log_sum in of_query] + [sinks]))
                shares = log_sums.softmax(0)[:-1, :, None].numpy()
                softmax.weighted[i] = (shares * np.stack([output for output, _ in of_query])).sum(0)

        monkeypatch.setattr(cpu_attention_kernel, "_attend_pieces", attend_and_join)
        assert parted(a_tree_of_readers())
