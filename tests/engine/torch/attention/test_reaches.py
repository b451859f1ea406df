"""Windows, chunked windows, sinks, soft caps, unlike K and V, shared K and V: against plain attention."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.torch.attention.paging import empty, reach_view_of
from engine.torch.attention.reach_cases import (
    CHUNKED,
    NUM_LAYERS,
    SLIDING,
    Case,
    attended,
    cases,
    chunk_of,
    expected,
    made_of,
)
from services.engine.torch.attention import cpu_attention_kernel, paged_attention, step_view
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.attention.step_view import IN_PLACE_DTYPES, InPlace, Reach
from services.values.errors import ProtocolError

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.03, torch.float16: 0.004}
WAYS = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, InPlace())]


def check(case, in_place):
    made = made_of(case)
    output, pool = expected(case, made)
    got = attended(case, made, in_place)
    torch.testing.assert_close(got.double(), output, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    # Its own slots, and no others.
    assert torch.equal(made.pool.numbers.nan_to_num(7), pool.numbers.nan_to_num(7))


@pytest.mark.exact
def test_each_token_attends_to_what_it_sees(subtests):
    for dtype, in_place in WAYS:
        with subtests.test(dtype=dtype, in_place=in_place):
            check_cases(dtype, in_place)


@pytest.mark.exact  # in half precision the kernel is compiled for it, for 12 s
@pytest.mark.parametrize("dtype", [dtype for dtype in IN_PLACE_DTYPES if dtype.itemsize == 2])
def test_each_token_attends_to_what_it_sees_in_half_precision(dtype):
    check_cases(dtype, None)
    check_cases(dtype, InPlace())


def check_cases(dtype, in_place):
    # In float32 most is seen; the others have to show that they are read and rounded as what they are.
    @settings(max_examples=settings().max_examples // (1 if dtype == torch.float32 else 3))
    @given(case=cases(dtype=dtype))
    def holds(case):
        check(case, in_place)

    holds()


@given(case=cases())
def test_however_many_threads_and_rows_at_once(case):
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(2) as executor:
        patched.setattr(step_view, "_SHARE_BYTES", 1)
        patched.setitem(paged_attention._SCORE_BYTES, "cpu", 700)
        check(case, InPlace(3, executor))


def windowed(kind, window, start, length, page_size=4, **settings):
    reach = Reach(1, kind, window)
    num_pages = -(-(start + length) // page_size)
    chunk = chunk_of(start, length, list(range(num_pages)), reach, page_size)
    return Case(
        PageShape(NUM_LAYERS, 2, page_size, 8, 8),
        num_pages,
        reach,
        (chunk,),
        group=2,
        softcap=None,
        has_sinks=False,
        **settings,
    )


def test_a_window_begins_where_it_should(subtests):
    # It is read, and a lost one is not passed over: by one token more or fewer the output is another.
    for length, in_place in itertools.product([1, 5], [None, InPlace()]):
        with subtests.test("a windows first page counts", length=length, in_place=in_place):
            case = windowed(SLIDING, 10, 18, length)
            [tail] = case.chunks[0].tails
            assert tail.first_page == 2  # the window of 18 begins with 9, the second of its page
            made = made_of(case)
            output, _ = expected(case, made)
            made.pool.layer(1)[0][tail.pages[0], :, 1] = 0
            assert (attended(case, made, in_place)[0].double() - output[0]).abs().max() > 1e-3
            without = replace(tail, first_page=3, pages=tail.pages[1:])
            lost = replace(case, chunks=(replace(case.chunks[0], tails=(without,)),))
            with pytest.raises(ProtocolError, match="needs pages 2 to"):
                attended(lost, made, in_place)
    for (kind, off_by), in_place in itertools.product(
        [(SLIDING, 1), (SLIDING, -1), (CHUNKED, 4), (CHUNKED, -4)], [None, InPlace()]
    ):
        with (
            subtests.test(
                "a window that begins elsewhere is seen", kind=kind, off_by=off_by, in_place=in_place
            ),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            see_another_beginning(kind, off_by, in_place, monkeypatch)


def see_another_beginning(kind, off_by, in_place, monkeypatch):
    of_a_tail, single = windowed(kind, 12, 21, 7), windowed(kind, 12, 21, 1)
    reach = replace(single.reach, pool=0)  # masked only: the pages are there, or it would be refused
    whole = replace(single, reach=reach, chunks=(chunk_of(21, 1, list(range(6)), reach, 4),))
    for case in (of_a_tail, single, whole):
        check(case, in_place)
    true = Reach.first_seen
    monkeypatch.setattr(Reach, "first_seen", lambda reach, position: true(reach, position) - off_by)
    for case in (of_a_tail, single, whole):
        with pytest.raises((AssertionError, ProtocolError)):
            check(case, in_place)


def several_pieces(**settings):
    """Two single tokens that share a page and have another each."""
    reach = Reach(0)
    chunks = (chunk_of(6, 1, [0, 1], reach, 4), chunk_of(5, 1, [0, 2], reach, 4))
    return Case(PageShape(NUM_LAYERS, 2, 4, 8, 8), 3, reach, chunks, 2, **settings)


def test_sinks_and_soft_caps_count(subtests):
    with subtests.test("a sink joins once"), pytest.MonkeyPatch.context() as monkeypatch:
        case = several_pieces(softcap=None, has_sinks=True)
        for in_place in (None, InPlace()):
            check(case, in_place)
        finish = cpu_attention_kernel._attend_pieces
        twice = np.float32(math.log(2))
        monkeypatch.setattr(
            cpu_attention_kernel,
            "_attend_pieces",
            lambda *args: finish(*args[:7], args[7] + twice, *args[8:]),
        )
        with pytest.raises(AssertionError):
            check(case, InPlace())
    for in_place in [None, InPlace()]:
        with subtests.test("a soft cap comes before the softmax", in_place=in_place):
            case = several_pieces(softcap=0.7, has_sinks=True)
            check(case, in_place)
            made = made_of(case)
            output, _ = expected(case, made)
            uncapped = attended(replace(case, softcap=None), made, in_place)
            assert (uncapped.double() - output).abs().max() > 0.05


def test_pages_inside_windows_are_read_together():
    """Windows of 12 tokens end at 22, 22 and 24: two begin within the page that the third no longer sees."""
    reach = Reach(0, SLIDING, 12)
    tables = [[9, 8, 7, 6, 5, own] for own in (1, 2, 3)]
    chunks = [chunk_of(end - 1, 1, pages, reach, 4) for end, pages in zip((22, 22, 24), tables, strict=True)]
    kv = empty(PageShape(1, 1, 4, 8, 8), num_pages=10)
    pieces = reach_view_of(kv, chunks, InPlace(), reach).decode.reads
    of_pieces = [slice(*bounds) for bounds in pairwise(pieces.page_starts)]
    readers = [tuple(pieces.readers[slice(*bounds)].tolist()) for bounds in pairwise(pieces.reader_starts)]
    reads = np.stack([pieces.pages, pieces.firsts, pieces.ends], axis=1).tolist()
    assert {who: sorted(reads[own]) for who, own in zip(readers, of_pieces, strict=True)} == {
        (0, 1, 2): [[5, 0, 4], [6, 0, 4]],
        (0, 1): [[7, 2, 4]],
        (0,): [[1, 0, 2]],
        (1,): [[2, 0, 2]],
        (2,): [[3, 0, 4]],
    }
