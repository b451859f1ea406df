from types import SimpleNamespace

import pytest
import torch

from services.engine.paged.runner import Chunk
from services.engine.torch.attention import paged_attention
from services.engine.torch.step_view import view_step
from services.request import SamplingParams

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 2, 3, 8
SCALING = 0.41
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 0.004}


def chunk(length, start, pages):
    return Chunk(range(length), start, pages, sample=False, sampling=SamplingParams())


def random_pool(num_pages, page_size, dtype, generator):
    shape = (num_pages, NUM_LAYERS, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def attend(kv, chunks, query, key, value, *, in_place, layer=1):
    view = view_step(kv, chunks, num_heads=NUM_KV_HEADS * GROUP, in_place=in_place)
    module = SimpleNamespace(layer_idx=layer)
    output, _ = paged_attention(
        module, query, key, value, None, scaling=SCALING, paged=view, dropout=0.0, sliding_window=None
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
    "more pages than tokens yet": [chunk(1, 17, [2, 3, 4, 5]), chunk(3, 10, [6, 7, 8])],
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", list(STEPS))
def test_attention_over_pages_is_attention_over_the_sequence(name, dtype, in_place):
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


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_both_paths_agree_at_any_page_size(page_size):
    generator = torch.Generator().manual_seed(page_size)
    num_pages = 400 // page_size + 8
    pages = torch.randperm(num_pages, generator=generator).tolist()
    half = num_pages // 2
    chunks = [chunk(1, half * page_size - 2, pages[:half]), chunk(1, 130, pages[half:])]
    kv = random_pool(num_pages, page_size, torch.float32, generator)
    query = torch.randn(1, NUM_KV_HEADS * GROUP, 2, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, 2, HEAD_DIM, generator=generator)
    gathered = attend(kv.clone(), chunks, query, key, value, in_place=False)
    torch.testing.assert_close(
        attend(kv, chunks, query, key, value, in_place=True), gathered, atol=2e-6, rtol=0
    )


def test_scores_far_apart_join_without_overflow():
    generator = torch.Generator().manual_seed(0)
    kv = random_pool(4, 16, torch.float32, generator)
    kv[2] *= 1000
    query = 100 * torch.randn(1, NUM_KV_HEADS * GROUP, 1, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
    chunks = [chunk(1, 60, [0, 2, 1, 3])]
    expected, _ = expected_attention(kv, chunks, query, key, value)
    got = attend(kv, chunks, query, key, value, in_place=True)
    torch.testing.assert_close(got.double(), expected, atol=0.05, rtol=1e-3)


def planned(chunks, kv):
    """Runs and copies as (pages, readers of each)."""
    decode = view_step(kv, chunks, num_heads=1, in_place=True).decode
    runs = [
        (list(range(r.first_page, r.first_page + r.num_pages)), r.readers.expand(r.num_pages, -1).tolist())
        for r in decode.runs
    ]
    return runs, [(c.pages.tolist(), c.readers.tolist(), c.num_tokens) for c in decode.copies]


def test_neighbouring_pages_with_as_many_readers_are_one_run():
    kv = torch.empty(24, 1, 2, 1, 16, 512)  # a gap of up to two pages for one reader is read for nothing
    chunks = [
        chunk(1, 74, [2, 3, 4, 5, 12]),
        chunk(1, 74, [2, 3, 4, 5, 15]),
        chunk(1, 45, [2, 3, 6]),
        chunk(1, 63, [8, 9, 10, 11]),
        chunk(1, 15, [22]),
    ]
    runs, copies = planned(chunks, kv)
    assert runs == [
        ([2, 3], [[0, 1, 2]] * 2),  # what all three share
        ([4, 5], [[0, 1]] * 2),  # what only two of them share
        # Private pages of four sequences, three of them still filling; 7, 13 and 14 are nobody's.
        ([*range(6, 16)], [[2], [0], [3], [3], [3], [3], [0], [0], [0], [1]]),
    ]
    assert copies == [([22], [[4]], 16)]  # alone it is not worth a call of its own


def test_what_is_not_worth_a_run_is_copied_once_for_all_its_readers():
    kv = torch.empty(24, 1, 2, 1, 16, 512)  # two pages make a run
    chunks = [chunk(1, 50, [2, 9, 4, 16]), chunk(1, 54, [2, 9, 20, 18])]
    runs, copies = planned(chunks, kv)
    assert runs == []
    # The last pages of both are less than half full.
    assert copies == [([16, 18, 4, 20], [[0], [1], [0], [1]], 16), ([2, 9], [[0, 1]] * 2, 16)]
    runs, copies = planned([chunk(1, 55, [2, 3, 4, 5]), chunk(1, 50, [8, 9, 10, 11])], kv)
    assert runs == [([2, 3, 4], [[0]] * 3), ([8, 9, 10], [[1]] * 3)]
    assert copies == [([5, 11], [[0], [1]], 8)]


def test_what_slots_past_the_end_hold_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    kv = random_pool(12, 16, torch.float32, generator)
    query = torch.randn(1, NUM_KV_HEADS * GROUP, 2, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, 2, HEAD_DIM, generator=generator)
    chunks = [chunk(1, 35, [2, 3, 4]), chunk(1, 41, [2, 3, 5])]
    expected = attend(kv.clone(), chunks, query, key, value, in_place=True)
    kv[4, ..., 4:, :] = 1e3
    torch.testing.assert_close(attend(kv, chunks, query, key, value, in_place=True), expected)
