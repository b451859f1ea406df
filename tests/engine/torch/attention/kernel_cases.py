"""Single tokens over shared pages, and what attention is there in float64: for any kernel, on any device."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from engine.torch.attention.paging import paged, reach_view_of
from services.engine.paged.runner import Chunk
from services.engine.torch.attention.parts import AttendParts, OnDevice
from services.engine.torch.attention.scores import Scores
from services.values.request import SamplingParams

NUM_KV_HEADS = 2
SCALING = 0.3


@dataclass(frozen=True, slots=True)
class Layout:
    """`group` is the number of query heads to a KV head."""

    dtype: torch.dtype
    head_dim: int
    group: int


def single_token(end, pages):
    return Chunk([0], end - 1, pages, sample=False, sampling=SamplingParams())


@st.composite
def steps(draw):
    """Single tokens whose pages are a tree's: each reader goes down some levels, then reads alone."""
    page_size = draw(st.sampled_from([1, 4, 16, 48]))
    depth = draw(st.integers(0, 3))
    levels = [draw(st.integers(1, 3)) for _ in range(depth)]
    next_page, prefixes = 0, [[]]
    for num_pages in levels:
        prefixes.append([*prefixes[-1], *range(next_page, next_page + num_pages)])
        next_page += num_pages
    chunks = []
    for _ in range(draw(st.integers(1, 20))):
        prefix = draw(st.sampled_from(prefixes))
        # One token, pages that are exactly full, and what lies between.
        own = draw(st.one_of(st.sampled_from([1, page_size, 2 * page_size]), st.integers(1, 3 * page_size)))
        end_page = next_page - (-own // page_size)
        chunks.append(single_token(len(prefix) * page_size + own, [*prefix, *range(next_page, end_page)]))
        next_page = end_page
    order = draw(st.permutations(range(next_page)))
    shuffled = [single_token(c.end, [order[page] for page in c.pages]) for c in chunks]
    return page_size, next_page, shuffled


def expected_attention(kv, chunks, query, scaling):
    """Of layer 1, sequence by sequence, in float64."""
    page_size = kv.shape[4]
    group = query.shape[1] // kv.shape[3]
    outputs = []
    for chunk, own in zip(chunks, query.double(), strict=True):
        slots = [(chunk.pages[p // page_size], p % page_size) for p in range(chunk.end)]
        k, v = (
            torch.stack([kv[page, 1, which, :, slot] for page, slot in slots], 1)
            .double()
            .repeat_interleave(group, 0)
            for which in (0, 1)
        )
        scores = torch.einsum("hd,htd->ht", own, k) * scaling
        outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    return torch.stack(outputs)


def forget_what_nobody_knows(kv, chunks):
    """NaN in all slots past the ends."""
    known = torch.zeros(kv.shape[0], kv.shape[4], dtype=torch.bool)
    for chunk in chunks:
        for position in range(chunk.end):
            known[chunk.pages[position // kv.shape[4]], position % kv.shape[4]] = True
    kv.masked_fill_(~known[:, None, None, None, :, None], torch.nan)


def attended(attend_parts: AttendParts, step, layout: Layout, num_programs: int, seed: int, device="cpu"):
    """What the kernel makes of random pages, and what float64 does: both float64, on the host.

    Slots that nobody reads hold NaN, and so does the output before.
    """
    page_size, num_pages, chunks = step
    generator = torch.Generator().manual_seed(seed)
    shape = (num_pages, 2, 2, NUM_KV_HEADS, page_size, layout.head_dim)
    kv = torch.randn(shape, generator=generator).to(layout.dtype)
    forget_what_nobody_knows(kv, chunks)
    num_heads = NUM_KV_HEADS * layout.group
    query = torch.randn(len(chunks), num_heads, layout.head_dim, generator=generator).to(layout.dtype)
    on_device, queries = paged(kv.to(device)), query.to(device)
    view = reach_view_of(on_device, chunks, OnDevice(attend_parts, num_heads, num_programs)).decode
    output = torch.full_like(queries, torch.nan)
    attend_parts(view, queries, on_device, 1, Scores(SCALING), output)
    return output.cpu().double(), expected_attention(kv, chunks, query, SCALING)
