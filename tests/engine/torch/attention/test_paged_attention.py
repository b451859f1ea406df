import itertools
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import CausalBias

from engine.torch.attention.paging import empty, paged, reach_view_of, view_of
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention import cpu_attention_kernel, step_view
from services.engine.torch.attention.paged_attention import (
    attend_gathered,
    attend_in_place,
    gather,
    paged_attention,
)
from services.engine.torch.attention.paged_kv import PageShape, Scores
from services.engine.torch.attention.step_view import IN_PLACE_DTYPES, InPlace, _causal_mask
from services.values.request import SamplingParams

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 2, 3, 8
SCALING = 0.41
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 0.004}


def chunk(length, start, pages):
    return Chunk(range(length), start, pages, sample=False, sampling=SamplingParams())


def random_pool(num_pages, page_size, dtype, generator):
    shape = (num_pages, NUM_LAYERS, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def attend(kv, chunks, query, key, value, *, in_place, layer=1):
    view = view_of(paged(kv), chunks, in_place, layer=layer)
    output, _ = paged_attention(
        SimpleNamespace(), query, key, value, None, scaling=SCALING, paged=view, dropout=0.0
    )
    return output[0]


def expected_attention(kv, chunks, query, key, value, layer=1):
    """Token by token, in float64, over a pool that stays as it is."""
    page_size = kv.shape[4]
    outputs, offset = [], 0
    kv = kv.double().clone()
    placed = []
    for c in chunks:
        for i in range(len(c.token_ids)):
            position = c.start + i
            page, slot = c.pages[position // page_size], position % page_size
            kv[page, layer, 0, :, slot] = key[0, :, offset].double()
            kv[page, layer, 1, :, slot] = value[0, :, offset].double()
            placed.append((c, position, offset))
            offset += 1
    for c, position, offset in placed:
        slots = [(c.pages[p // page_size], p % page_size) for p in range(position + 1)]
        k = torch.stack([kv[page, layer, 0, :, slot] for page, slot in slots], 1).repeat_interleave(GROUP, 0)
        v = torch.stack([kv[page, layer, 1, :, slot] for page, slot in slots], 1).repeat_interleave(GROUP, 0)
        scores = torch.einsum("hd,htd->ht", query[0, :, offset].double(), k) * SCALING
        outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    return torch.stack(outputs), kv


STEPS = {
    "one token alone": [chunk(1, 0, [4])],
    "one token in a full page": [chunk(1, 15, [4])],
    "one token, neighbouring and lone pages, a tail": [chunk(1, 50, [5, 6, 2, 9])],
    "one token, pages against the token order": [chunk(1, 40, [8, 7, 6])],
    "a whole prompt": [chunk(37, 0, [3, 1, 2])],
    "the tail of a prompt": [chunk(20, 30, [3, 1, 2, 0])],
    "two chunks, two single tokens": [
        chunk(5, 0, [3]),
        chunk(1, 33, [4, 5, 6]),
        chunk(18, 16, [7, 8, 9]),
        chunk(1, 0, [11]),
    ],
    "a shared prefix, three readers": [
        chunk(1, 50, [2, 3, 4, 5]),
        chunk(1, 40, [2, 3, 6]),
        chunk(1, 32, [2, 3, 7]),
        chunk(1, 31, [9, 8]),
    ],
    "prefixes of prefixes, with a chunk between": [
        chunk(1, 60, [2, 3, 4, 5]),
        chunk(1, 61, [2, 3, 4, 6]),
        chunk(1, 50, [2, 3, 4, 7]),
        chunk(1, 40, [2, 3, 8]),
        chunk(4, 44, [2, 3, 9]),
        chunk(1, 20, [2, 10]),
        chunk(1, 3, [11]),
    ],
    "more pages than tokens yet": [chunk(1, 17, [2, 3, 4, 5]), chunk(3, 10, [6, 7, 8])],
}


# Each worker that runs one in half precision compiles the kernel for it, for 12 s.
IN_HALF = [dtype for dtype in IN_PLACE_DTYPES if dtype.itemsize == 2]
IN_PLACE_WAYS = ("in place", "by three threads")
WAYS = [(torch.float32, way) for way in ("gathered", *IN_PLACE_WAYS)]
# What is gathered in half precision rounds otherwise, and is placed alike.
HALF_STEPS = ("one token, neighbouring and lone pages, a tail", "prefixes of prefixes, with a chunk between")


@pytest.fixture(scope="module")
def three_threads():
    with ThreadPoolExecutor(2) as executor:
        yield InPlace(3, executor)


def test_attention_over_pages_is_attention_over_the_sequence(subtests, three_threads, monkeypatch):
    halves = [(dtype, "gathered") for dtype in (torch.bfloat16, torch.float16)]
    in_half = itertools.product(HALF_STEPS, halves)
    for name, (dtype, way) in (*itertools.product(STEPS, WAYS), *in_half):
        with subtests.test(name, dtype=dtype, way=way):
            check_step(name, dtype, way, three_threads, monkeypatch)


@pytest.mark.exact
@pytest.mark.parametrize("dtype", IN_HALF)
def test_in_half_precision_it_is_too(subtests, dtype, three_threads, monkeypatch):
    for name, way in itertools.product(STEPS, IN_PLACE_WAYS):
        with subtests.test(name, way=way):
            check_step(name, dtype, way, three_threads, monkeypatch)


def check_step(name, dtype, way, three_threads, monkeypatch):
    monkeypatch.setattr(step_view, "_SHARE_BYTES", 1)
    in_place = {"gathered": None, "by three threads": three_threads}.get(way, InPlace())
    generator = torch.Generator().manual_seed(0)
    chunks = STEPS[name]
    total = sum(len(c.token_ids) for c in chunks)
    kv = random_pool(12, 16, dtype, generator)
    query = torch.randn(1, NUM_KV_HEADS * GROUP, total, HEAD_DIM, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, total, HEAD_DIM, generator=generator).to(dtype)
    expected, kv_after = expected_attention(kv, chunks, query, key, value)
    got = attend(kv, chunks, query, key, value, in_place=in_place)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(kv.double(), kv_after)  # the chunks' own slots and no others


def check_mask(name, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    chunks = STEPS[name]
    total = sum(len(c.token_ids) for c in chunks)
    kv = random_pool(12, 16, torch.float32, generator)
    query = torch.randn(1, NUM_KV_HEADS * GROUP, total, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, total, HEAD_DIM, generator=generator)
    expected = attend(kv, chunks, query, key, value, in_place=None)
    masks = []

    def told_of(length, end, device):
        masks.append(_causal_mask(length, end, torch.device("cuda")))
        return masks[-1]

    monkeypatch.setattr(step_view, "_causal_mask", told_of)
    assert torch.equal(attend(kv, chunks, query, key, value, in_place=None), expected)
    assert masks
    assert all(isinstance(mask, CausalBias) for mask in masks)


def test_the_mask_that_a_gpu_is_only_told_of_is_the_one_that_a_cpu_gets(subtests):
    for name in [name for name in STEPS if any(c.start and len(c.token_ids) > 1 for c in STEPS[name])]:
        with subtests.test(name=name), pytest.MonkeyPatch.context() as monkeypatch:
            check_mask(name, monkeypatch)


def test_the_kernel_is_compiled_once_whatever_a_step_looks_like():
    """It takes seconds, in which a rank stands still."""
    for chunks in STEPS.values():
        total = sum(len(c.token_ids) for c in chunks)
        kv = torch.zeros(12, NUM_LAYERS, 2, NUM_KV_HEADS, 16, HEAD_DIM)
        query = torch.zeros(1, NUM_KV_HEADS * GROUP, total, HEAD_DIM)
        key = torch.zeros(1, NUM_KV_HEADS, total, HEAD_DIM)
        attend(kv, chunks, query, key, key, in_place=InPlace())
    pools = [types[1] for types in cpu_attention_kernel._attend_pieces.signatures]
    assert numba.float32[::1] in pools
    assert len(pools) == len(set(pools))


def test_in_place_it_is_as_where_pages_are_gathered(subtests):
    for page_size in [1, 3, 16, 64]:
        with subtests.test("both paths agree at any page size", page_size=page_size):
            generator = torch.Generator().manual_seed(page_size)
            num_pages = 400 // page_size + 8
            pages = torch.randperm(num_pages, generator=generator).tolist()
            half = num_pages // 2
            chunks = [chunk(1, half * page_size - 2, pages[:half]), chunk(1, 130, pages[half:])]
            kv = random_pool(num_pages, page_size, torch.float32, generator)
            query = torch.randn(1, NUM_KV_HEADS * GROUP, 2, HEAD_DIM, generator=generator)
            key, value = torch.randn(2, 1, NUM_KV_HEADS, 2, HEAD_DIM, generator=generator)
            gathered = attend(kv.clone(), chunks, query, key, value, in_place=None)
            torch.testing.assert_close(
                attend(kv, chunks, query, key, value, in_place=InPlace()), gathered, atol=2e-6, rtol=0
            )
    # Fewer heads than there are lanes, as many, more; and rows that no number of registers divides.
    for head_dim, num_readers, (kv_heads, group) in itertools.product(
        [3, 8, 20], READERS, [(1, 1), (1, 20), (2, 7), (4, 2)]
    ):
        with subtests.test(
            "any number of heads reads a page at once",
            head_dim=head_dim,
            num_readers=num_readers,
            kv_heads=kv_heads,
            group=group,
        ):
            many_read_a_page(kv_heads, group, num_readers, head_dim)
    for in_place in [False, True]:
        with subtests.test("what slots past the end hold does not matter", in_place=in_place):
            generator = torch.Generator().manual_seed(0)
            kv = random_pool(12, 16, torch.float32, generator)
            query = torch.randn(1, NUM_KV_HEADS * GROUP, 2, HEAD_DIM, generator=generator)
            key, value = torch.randn(2, 1, NUM_KV_HEADS, 2, HEAD_DIM, generator=generator)
            chunks = [chunk(1, 35, [2, 3, 4]), chunk(1, 41, [2, 3, 5])]
            expected = attend(kv.clone(), chunks, query, key, value, in_place=InPlace() if in_place else None)
            kv[4, ..., 4:, :] = torch.nan
            torch.testing.assert_close(
                attend(kv, chunks, query, key, value, in_place=InPlace() if in_place else None), expected
            )
    with subtests.test("scores far apart join without overflow"):
        generator = torch.Generator().manual_seed(0)
        kv = random_pool(4, 16, torch.float32, generator)
        kv[2] *= 1000
        query = 100 * torch.randn(1, NUM_KV_HEADS * GROUP, 1, HEAD_DIM, generator=generator)
        key, value = torch.randn(2, 1, NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
        chunks = [chunk(1, 60, [0, 2, 1, 3])]
        expected, _ = expected_attention(kv, chunks, query, key, value)
        got = attend(kv, chunks, query, key, value, in_place=InPlace())
        torch.testing.assert_close(got.double(), expected, atol=0.05, rtol=1e-3)


READERS = [1, 2, 5, 9, 40]


def many_read_a_page(kv_heads, group, num_readers, head_dim):
    generator = torch.Generator().manual_seed(num_readers)
    kv = torch.randn(3 + num_readers, 1, 2, kv_heads, 13, head_dim, generator=generator)
    chunks = [chunk(1, 26 + i % 13, [2, 0, 3 + i]) for i in range(num_readers)]
    query = torch.randn(num_readers, kv_heads * group, head_dim, generator=generator)
    pool, scores = paged(kv), Scores(0.3)
    gathered = [reach_view_of(pool, [c]).chunks[0] for c in chunks]
    contexts = [[gather(pages, c) for pages in pool.layer(0)] for c in gathered]
    expected = [
        attend_gathered(q[None], *context, c, scores)
        for q, context, c in zip(query, contexts, gathered, strict=True)
    ]
    view = reach_view_of(pool, chunks, InPlace())
    attended = torch.from_numpy(attend_in_place(query.numpy(), view.decode, view, 0, scores))
    torch.testing.assert_close(attended, torch.cat(expected), atol=2e-6, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [pytest.param(8, marks=pytest.mark.slow), 16])
def test_a_processor_with_other_registers_computes_the_same(lanes, tmp_path):
    """A process of its own tries it: how many heads at once is compiled in, and not to be kept."""
    program = (
        "from services.engine.torch.attention import cpu_attention_kernel\n"
        f"cpu_attention_kernel._MAX_LANES = {lanes}\n"
        "from test_paged_attention import READERS, many_read_a_page\n"
        "for num_readers in READERS:\n"
        "    many_read_a_page(2, 3, num_readers, 8)\n"
        "print(cpu_attention_kernel._attend_pieces.signatures != [])"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr


@given(
    ends=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    num_threads=st.integers(1, 5),
    share_bytes=st.integers(1, 1 << 16),
)
def test_threads_share_all_items_and_none_has_much_more_than_its_part(ends, num_threads, share_bytes):
    page_size, heads = 16, 2
    kv = torch.empty(13 * len(ends), 1, 2, heads, page_size, 8)
    chunks = [chunk(1, end - 1, range(13 * i, 13 * i + 13)) for i, end in enumerate(ends)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_view, "_SHARE_BYTES", share_bytes)
        shares = reach_view_of(paged(kv), chunks, InPlace(num_threads)).decode.shares
    assert [item for share in shares for item in share] == list(range(heads * len(ends)))
    assert 1 <= len(shares) <= num_threads
    assert all(shares)
    pages = [-(-ends[item % len(ends)] // page_size) for item in range(heads * len(ends))]
    if len(shares) > 1:
        assert sum(pages) * 2 * page_size * 8 * 4 >= len(shares) * share_bytes
    else:
        assert num_threads == 1 or sum(pages) * 2 * page_size * 8 * 4 < 2 * share_bytes or len(pages) < 3
    parts = [sum(pages[share.start : share.stop]) for share in shares]
    most = sum(pages) / min(num_threads, len(shares)) + max(pages)
    assert max(parts) <= most


def planned(chunks, page_size=16):
    """PagePieces as (readers, {page: tokens}), in their order."""
    view = reach_view_of(empty(PageShape(1, 1, page_size, 8, 8)), chunks, InPlace()).decode
    pages, firsts, ends, page_starts, readers, reader_starts = (array.tolist() for array in view.reads)
    assert not any(firsts)
    reads = list(zip(pages, ends, strict=True))
    assert (page_starts[-1], reader_starts[-1]) == (len(pages), len(readers))
    return [
        (readers[reader_starts[i] : reader_starts[i + 1]], dict(reads[page_starts[i] : page_starts[i + 1]]))
        for i in range(len(page_starts) - 1)
    ]


def test_pieces_are_pages_with_the_same_readers(subtests):
    with subtests.test("neighbouring pages with the same readers are one piece wherever they are"):
        pieces = planned(
            [
                chunk(1, 74, [9, 3, 4, 25, 12]),
                chunk(1, 74, [9, 3, 4, 25, 15]),
                chunk(1, 77, [9, 3, 4, 25, 16]),
                chunk(1, 45, [9, 3, 6]),
                chunk(1, 15, [22]),
            ]
        )
        assert len(pieces) == 7
        assert ([0, 1, 2, 3], {9: 16, 3: 16}) in pieces  # what four share
        assert ([0, 1, 2], {4: 16, 25: 16}) in pieces  # what only three of them share
        for i, own in enumerate([{12: 11}, {15: 11}, {16: 14}, {6: 14}, {22: 16}]):
            assert ([i], own) in pieces
    with subtests.test("of a page that is being filled each reads what it knows"):
        pieces = planned([chunk(1, 9, [2]), chunk(1, 11, [2]), chunk(1, 9, [2])])
        assert sorted(pieces) == [([0], {2: 10}), ([1], {2: 12}), ([2], {2: 10})]


@given(
    tables=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    )
)
def test_every_query_reads_its_pages_in_their_order_and_a_full_one_is_read_once(tables):
    """The sharing may look like anything, also where it is no tree."""
    page_size = 4
    chunks = [chunk(1, len(pages) * page_size - 1 - less, pages) for pages, less in tables]
    pieces = planned(chunks, page_size)
    for i, (pages, less) in enumerate(tables):
        wanted = dict.fromkeys(pages, page_size) | {pages[-1]: page_size - less}
        read = [read for readers, reads in pieces if i in readers for read in reads.items()]
        assert read == list(wanted.items())
    full = Counter(
        page for _, reads in pieces for page, num_tokens in reads.items() if num_tokens == page_size
    )
    places = {(place, page) for pages, _ in tables for place, page in enumerate(pages[:-1])}
    places |= {(len(pages) - 1, pages[-1]) for pages, less in tables if not less}
    assert full == Counter(page for _, page in places)


def test_a_chunks_context_is_copied_and_not_the_pool():
    """The pool is one page, as often as no memory can hold: a copy of it cannot be had."""
    num_pages = 2**38
    page = torch.arange(2 * 16 * 8, dtype=torch.float32).reshape(2, 16, 8)
    keys, _ = torch.stack([page, -page])[None].expand(num_pages, 2, 2, 16, 8).unbind(1)
    chunk = SimpleNamespace(pages=torch.tensor([3, num_pages - 1, 5]), skip=2, num_seen=40)
    gathered = gather(keys, chunk)
    assert torch.equal(gathered, torch.cat([page, page, page], dim=1)[:, 2:42])
    with pytest.raises(RuntimeError, match="allocate"):
        keys.transpose(0, 1).contiguous()
