"""Steps over pools of which only what a sequence needs is known, and what attention is there, token by token.

Every other number of the pool is NaN: pages that have left a window, slots past the ends, other pools.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from hypothesis import strategies as st

from engine.torch.attention.paging import layers_of
from services.engine.paged.model_runner import Chunk, TailPages
from services.engine.torch.attention.paged_attention import paged_attention
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.step_view import Reach, view_step
from services.kv.tails import tail_start
from services.values.kv import GroupKind, KvGroup
from services.values.request import SamplingParams

FULL, SLIDING, CHUNKED = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW
LAYER, NUM_LAYERS = 1, 2
SCALING = 0.41


@dataclass(frozen=True)
class Case:
    shape: PageShape
    num_pages: int
    reach: Reach
    chunks: tuple[Chunk, ...]
    group: int  # query heads to a KV head
    softcap: float | None
    has_sinks: bool
    stores: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0


@st.composite
def cases(draw, **fixed):
    """Sequences of a few pages; some read a prefix together; each has pages of its own where it writes."""
    page_size = draw(st.sampled_from([1, 3, 4, 16]))
    reach = draw(
        st.one_of(
            st.builds(Reach, st.just(0)),
            st.builds(
                Reach, st.sampled_from([0, 1]), st.sampled_from([SLIDING, CHUNKED]), st.integers(1, 40)
            ),
        )
    )
    shared = draw(st.integers(0, 3))
    next_page, chunks = shared, []
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.sampled_from([0, shared * page_size]))
        start = begin + draw(st.integers(0, 40))
        length = draw(st.one_of(st.just(1), st.integers(1, 30)))
        num_own = -(-(start + length) // page_size) - begin // page_size
        pages = [*range(begin // page_size), *range(next_page, next_page + num_own)]
        next_page += num_own
        store_from = draw(st.sampled_from([0, start, start + length // 2, start + length]))
        chunks.append(chunk_of(start, length, pages, reach, page_size, store_from))
    order = draw(st.permutations(range(next_page)))
    head_dim = draw(st.sampled_from([4, 8]))
    drawn = Case(
        PageShape(NUM_LAYERS, 2, page_size, head_dim, draw(st.sampled_from([head_dim, 6]))),
        next_page,
        reach,
        tuple(moved(chunk, order) for chunk in chunks),
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([None, 1.5])),
        draw(st.booleans()),
        stores=draw(st.sampled_from([True, True, False])),
        seed=draw(st.integers(0, 99)),
    )
    return replace(drawn, **fixed)


def chunk_of(start, length, pages, reach, page_size, store_from=0):
    """`pages` from the sequence's beginning; of pool 1 it has those that the tail needs."""
    chunk = Chunk(range(length), start, pages, sample=False, sampling=SamplingParams(), store_from=store_from)
    if reach.pool == 0:
        return chunk
    group = KvGroup(reach.kind, (0,), 1, 1, "float32", window=reach.window)
    first_page = tail_start(group, start, page_size) // page_size
    return replace(chunk, pages=[], tails=(TailPages(first_page, pages[first_page:]),))


def moved(chunk, order):
    tails = tuple(TailPages(t.first_page, [order[page] for page in t.pages]) for t in chunk.tails)
    return replace(chunk, pages=[order[page] for page in chunk.pages], tails=tails)


@dataclass(frozen=True)
class Made:
    """A case has a pool as it is before the step, and the step's numbers, of the case's dtype."""

    pool: PagedKv
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


def made_of(case):
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(case.dtype)

    shape = case.shape
    pool = PagedKv(random(case.num_pages * shape.page_numbers), shape)
    is_known = torch.zeros(case.num_pages, shape.page_size, dtype=torch.bool)
    for chunk in case.chunks:
        for position in range(first_seen(case.reach, chunk.start), known_until(case, chunk)):
            is_known[place_of(case, chunk, position)] = True
    for layer in range(NUM_LAYERS):
        for numbers in pool.layer(layer):
            numbers.masked_fill_(~is_known[:, None, :, None] | (layer != LAYER), torch.nan)
    total = sum(len(chunk.token_ids) for chunk in case.chunks)
    heads, kv_heads = shape.num_kv_heads * case.group, shape.num_kv_heads
    return Made(
        pool,
        3 * random(1, heads, total, shape.head_dim),
        random(1, kv_heads, total, shape.head_dim),
        random(1, kv_heads, total, shape.v_head_dim),
        random(heads) if case.has_sinks else None,
    )


def known_until(case, chunk):
    """The step's own rows are there already where they are not stored."""
    if not case.stores:
        return chunk.end
    return max(chunk.start, min(chunk.store_from, chunk.end)) if case.reach.pool == 0 else chunk.start


def first_seen(reach, position):
    if reach.kind is SLIDING:
        return max(0, position - reach.window + 1)
    return position // reach.window * reach.window if reach.kind is CHUNKED else 0


def place_of(case, chunk, position):
    """(page, slot)."""
    page = position // case.shape.page_size
    if case.reach.pool:
        tail = chunk.tails[case.reach.pool - 1]
        pages, page = tail.pages, page - tail.first_page
    else:
        pages = chunk.pages
    return pages[page], position % case.shape.page_size


def expected(case, made):
    """Return what the step gives, float64 [total, heads, v_head_dim], and its pool afterwards."""
    pool = PagedKv(made.pool.numbers.clone(), made.pool.shape)
    keys, values = pool.layer(LAYER)
    row = 0
    for chunk in case.chunks:
        for position in range(chunk.start, chunk.end):
            if position >= known_until(case, chunk):
                page, slot = place_of(case, chunk, position)
                keys[page, :, slot], values[page, :, slot] = made.key[0, :, row], made.value[0, :, row]
            row += 1
    outputs = []
    for chunk in case.chunks:
        for position in range(chunk.start, chunk.end):
            outputs.append(of_token(case, made, keys, values, chunk, position, len(outputs)))
    return torch.stack(outputs), pool


def of_token(case, made, keys, values, chunk, position, row):
    seen = range(first_seen(case.reach, position), position + 1)
    places = [place_of(case, chunk, i) for i in seen]
    k, v = (
        torch.stack([of[page, :, slot] for page, slot in places], 1).double().repeat_interleave(case.group, 0)
        for of in (keys, values)
    )
    scores = torch.einsum("hd,htd->ht", made.query[0, :, row].double(), k) * SCALING
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    exponentials = scores.exp()
    total = exponentials.sum(-1)
    if made.sinks is not None:
        total = total + made.sinks.double().exp()
    return torch.einsum("ht,htd->hd", exponentials / total[:, None], v)


class SharedLayer:
    def __init__(self, stores):
        self._stores = stores

    def take(self):
        return LAYER, self._stores


def attended(case, made, in_place, packing=None):
    """The same by paged_attention; `made.pool` is as it leaves it."""
    layers = layers_of(made.pool, in_place, case.reach, packing)
    view = view_step(layers, case.chunks, SharedLayer(case.stores))
    window = case.reach.window if case.reach.kind is SLIDING else None
    output, _ = paged_attention(
        SimpleNamespace(),
        made.query,
        made.key,
        made.value,
        None,
        scaling=SCALING,
        paged=view,
        sliding_window=window,
        softcap=case.softcap,
        s_aux=made.sinks,
    )
    return output[0]
