"""Single tokens over shared pages, and what attention is there in float64: for any kernel, on any device."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from engine.torch.attention.paging import reach_view_of
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.page_pieces import AttendParts, OnDevice
from services.engine.torch.attention.paged_kv import PagedKv, PageShape, Scores
from services.engine.torch.attention.step_view import Reach
from services.values.kv import GroupKind
from services.values.request import SamplingParams

NUM_KV_HEADS = 2
SCALING = 0.3


@dataclass(frozen=True, slots=True)
class Layout:
    """`group` is the number of query heads to a KV head."""

    dtype: torch.dtype
    head_dim: int
    group: int
    v_head_dim: int | None = None  # as head_dim


@dataclass(frozen=True, slots=True)
class Step:
    page_size: int
    num_pages: int
    chunks: list[Chunk]
    reach: Reach = Reach(0)  # noqa: RUF009
    softcap: float | None = None
    has_sinks: bool = False


def single_token(end, pages):
    return Chunk([0], end - 1, pages, sample=False, sampling=SamplingParams())


@st.composite
def steps(draw):
    """Single tokens whose pages are a tree's: each reader goes down some levels, then reads alone.

    Windows cut the pages of all, somewhere in one.
    """
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
    kind = draw(st.sampled_from([None, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW]))
    reach = Reach(0) if kind is None else Reach(0, kind, draw(st.integers(1, 150)))
    cap = draw(st.sampled_from([None, 2.0]))
    return Step(page_size, next_page, shuffled, reach, cap, draw(st.booleans()))


def seen_by(chunk, reach):
    return range(max(0, reach.first_seen(chunk.start)), chunk.end)


def expected_attention(kv, step, query, scores):
    """Compute layer 1, sequence by sequence, in float64."""
    group = query.shape[1] // kv.shape.num_kv_heads
    outputs = []
    for chunk, own in zip(step.chunks, query.double(), strict=True):
        slots = [(chunk.pages[p // step.page_size], p % step.page_size) for p in seen_by(chunk, step.reach)]
        k, v = (
            torch.stack([of[page, :, slot] for page, slot in slots], 1).double().repeat_interleave(group, 0)
            for of in kv.layer(1)
        )
        exponents = torch.einsum("hd,htd->ht", own, k) * scores.scaling
        if scores.softcap is not None:
            exponents = scores.softcap * torch.tanh(exponents / scores.softcap)
        log_sums = exponents.logsumexp(-1)
        if scores.sinks is not None:
            log_sums = torch.logaddexp(log_sums, scores.sinks.double())
        outputs.append(torch.einsum("ht,htd->hd", (exponents - log_sums[:, None]).exp(), v))
    return torch.stack(outputs)


def forget_what_nobody_reads(kv, step):
    """NaN in all other slots."""
    is_read = torch.zeros(kv.num_pages, step.page_size, dtype=torch.bool)
    for chunk in step.chunks:
        for position in seen_by(chunk, step.reach):
            is_read[chunk.pages[position // step.page_size], position % step.page_size] = True
    for layer in range(kv.shape.num_layers):
        for numbers in kv.layer(layer):
            numbers.masked_fill_(~is_read[:, None, :, None], torch.nan)


def attended(attend_parts: AttendParts, step, layout: Layout, num_programs: int, seed: int, device="cpu"):
    """Return what the kernel makes of random pages, and what float64 does: both float64, on the host.

    Slots that nobody reads hold NaN, and so does the output before.
    """
    generator = torch.Generator().manual_seed(seed)
    v_head_dim = layout.v_head_dim or layout.head_dim
    shape = PageShape(2, NUM_KV_HEADS, step.page_size, layout.head_dim, v_head_dim)
    numbers = torch.randn(step.num_pages * shape.page_numbers, generator=generator).to(layout.dtype)
    kv = PagedKv(numbers, shape)
    forget_what_nobody_reads(kv, step)
    num_heads = NUM_KV_HEADS * layout.group
    query = torch.randn(len(step.chunks), num_heads, layout.head_dim, generator=generator).to(layout.dtype)
    sinks = torch.randn(num_heads, generator=generator).to(layout.dtype) if step.has_sinks else None
    expected = expected_attention(kv, step, query, Scores(SCALING, step.softcap, sinks))
    on_device, queries = PagedKv(numbers.to(device), shape), query.to(device)
    in_place = OnDevice(attend_parts, num_heads, num_programs)
    view = reach_view_of(on_device, step.chunks, in_place, step.reach).decode
    output = torch.full((len(step.chunks), num_heads, v_head_dim), torch.nan, dtype=query.dtype).to(device)
    scores = Scores(SCALING, step.softcap, None if sinks is None else sinks.to(device))
    attend_parts(view, queries, on_device, 1, scores, output)
    return output.cpu().double(), expected
