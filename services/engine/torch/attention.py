"""Attention over the paged KV pool, for Hugging Face model definitions.

    view_step(pool, chunks)   once a step: where each token's K and V go, what each query reads
    model(..., paged=view)    transformers hands our keyword to the attention function of each layer
      paged_attention         1. store the step's K and V in their pages
                              2. chunks of several tokens: gather the sequence's K and V, attend causally
                              3. single tokens: the same, or (on CPU) attend page by page where they lie

The packed tokens of a step are one row: input_ids and position_ids are [1, total]. For an attention
implementation it does not know, transformers passes attention_mask None; the view says it all.

Attending in place never copies K or V. Neighbouring pages are one strided tensor with pages as the
batch dimension; each page yields its own softmax, and the pages of a sequence are joined by their
log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867). Keys carry their positions already (rotary
embedding), so pages may be taken in any order, and a page that several sequences read is read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.engine.paged.runner import Chunk

IMPLEMENTATION = "isthmus_paged"

# Below this a page is too little work for a softmax of its own: gathering is cheaper.
MIN_PAGE_SIZE_IN_PLACE = 16


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Tokens [offset, offset + length) of the step: the last ones of a sequence of `end` tokens."""

    offset: int
    length: int
    end: int
    pages: Tensor  # int64, the pages of positions [0, end)
    mask: Tensor | None  # bool [length, end]; None where is_causal or nothing is masked

    @property
    def is_causal(self) -> bool:
        return self.length == self.end


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Neighbouring pages with the same readers; the first `num_tokens` slots of each are read."""

    first_page: int
    num_pages: int
    num_tokens: int
    readers: Tensor  # int64, rows of the decode queries


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The step's single tokens, attended in place."""

    offsets: Tensor  # int64 [num_queries], where they are in the step
    spans: tuple[PageSpan, ...]
    segments: Tensor  # int64, the query of each row that the spans yield, in their order


@dataclass(frozen=True, slots=True)
class StepView:
    """Everything that attention must know of a step, the same for all layers."""

    kv: Tensor  # the pool: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    token_pages: Tensor  # int64 [total]
    token_slots: Tensor  # int64 [total]
    chunks: tuple[ChunkView, ...]
    decode: DecodeView | None


def view_step(kv: Tensor, chunks: Sequence[Chunk], *, in_place: bool) -> StepView:
    """Plan a step over the pool `kv`. With `in_place`, single tokens never gather (CPU only)."""
    page_size = kv.shape[4]
    offsets = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)])[:-1].tolist()
    placed = list(zip(offsets, chunks, strict=True))
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    pages = [np.asarray(c.pages, np.int64)[p // page_size] for c, p in zip(chunks, positions, strict=True)]
    decodes = [(offset, c) for offset, c in placed if in_place and len(c.token_ids) == 1]
    gathered = [(offset, c) for offset, c in placed if not (in_place and len(c.token_ids) == 1)]
    return StepView(
        kv=kv,
        token_pages=torch.from_numpy(np.concatenate(pages)).to(kv.device),
        token_slots=torch.from_numpy(np.concatenate(positions) % page_size).to(kv.device),
        chunks=tuple(_view_chunk(offset, chunk, page_size, kv.device) for offset, chunk in gathered),
        decode=_view_decodes(decodes, page_size) if decodes else None,
    )


def _view_chunk(offset: int, chunk: Chunk, page_size: int, device: torch.device) -> ChunkView:
    length, end = len(chunk.token_ids), chunk.end
    mask = None
    if chunk.start > 0 and length > 1:
        mask = torch.ones(length, end, dtype=torch.bool, device=device).tril(chunk.start)
    pages = torch.tensor(chunk.pages[: -(-end // page_size)], dtype=torch.int64, device=device)
    return ChunkView(offset, length, end, pages, mask)


def _view_decodes(decodes: Sequence[tuple[int, Chunk]], page_size: int) -> DecodeView:
    readers: dict[int, list[int]] = {}
    tails: list[PageSpan] = []
    for row, (_, chunk) in enumerate(decodes):
        num_full, num_tail_tokens = divmod(chunk.end, page_size)
        for page in chunk.pages[:num_full]:
            readers.setdefault(page, []).append(row)
        if num_tail_tokens:
            tails.append(PageSpan(chunk.pages[num_full], 1, num_tail_tokens, torch.tensor([row])))
    spans = (*_merge_pages(readers, page_size), *tails)
    return DecodeView(
        offsets=torch.tensor([offset for offset, _ in decodes]),
        spans=spans,
        segments=torch.cat([span.readers.repeat(span.num_pages) for span in spans]),
    )


def _merge_pages(readers: dict[int, list[int]], page_size: int) -> list[PageSpan]:
    """Neighbouring pages with equal readers become one span."""
    spans: list[PageSpan] = []
    pages = sorted(readers)
    first = 0
    for i in range(1, len(pages) + 1):
        run_ends = (
            i == len(pages) or pages[i] != pages[i - 1] + 1 or readers[pages[i]] != readers[pages[first]]
        )
        if run_ends:
            spans.append(PageSpan(pages[first], i - first, page_size, torch.tensor(readers[pages[first]])))
            first = i
    return spans


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: StepView,
    **_ignored: Any,  # dropout, sliding_window (refused at load) and what else transformers passes
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it.

    `query` is [1, num_heads, total, head_dim], `key` and `value` [1, num_kv_heads, total, head_dim].
    Returns [1, total, num_heads, head_dim]. Writes the pool.
    """
    keys, values = paged.kv[:, module.layer_idx].unbind(1)
    keys[paged.token_pages, :, paged.token_slots] = key[0].transpose(0, 1)
    values[paged.token_pages, :, paged.token_slots] = value[0].transpose(0, 1)
    queries = query[0].transpose(0, 1)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for chunk in paged.chunks:
        rows = slice(chunk.offset, chunk.offset + chunk.length)
        output[rows] = attend_gathered(queries[rows], keys, values, chunk, scaling)
    if paged.decode is not None:
        offsets = paged.decode.offsets
        output[offsets] = attend_in_place(queries[offsets], keys, values, paged.decode, scaling)
    return output[None], None


def attend_gathered(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkView, scaling: float) -> Tensor:
    """`query` and the result are [length, num_heads, head_dim]; `keys` and `values` one layer's pages."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    # KV heads as the batch, the query heads of a group as its heads: nothing is repeated for GQA.
    grouped = query.transpose(0, 1).unflatten(0, (num_kv_heads, -1))
    shape = (num_kv_heads, grouped.shape[1], chunk.end, head_dim)
    output = scaled_dot_product_attention(
        grouped,
        _gather(keys, chunk).expand(shape),
        _gather(values, chunk).expand(shape),
        attn_mask=chunk.mask,
        is_causal=chunk.is_causal and chunk.length > 1,
        scale=scaling,
    )
    return output.flatten(0, 1).transpose(0, 1)


def _gather(pages: Tensor, chunk: ChunkView) -> Tensor:
    """The sequence's K or V in token order: [num_kv_heads, 1, end, head_dim]."""
    own = pages.index_select(0, chunk.pages).transpose(0, 1)
    return own.flatten(1, 2)[:, None, : chunk.end]


def attend_in_place(query: Tensor, keys: Tensor, values: Tensor, view: DecodeView, scaling: float) -> Tensor:
    """`query` and the result are [num_queries, num_heads, head_dim]; `keys`, `values` one layer's pages."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    parts = [_attend_span(grouped, keys, values, span, scaling) for span in view.spans]
    outputs, log_sums = zip(*parts, strict=True)
    return _join(torch.cat(outputs), torch.cat(log_sums), view.segments, len(query)).flatten(1, 2)


def _attend_span(
    grouped: Tensor, keys: Tensor, values: Tensor, span: PageSpan, scaling: float
) -> tuple[Tensor, Tensor]:
    """Each reader against each page, as rows, page by page; and the log-sum-exp of each row's softmax.

    Shapes [rows, num_kv_heads, group, head_dim] and, in float32, [rows, num_kv_heads, group].
    """
    num_readers = len(span.readers)
    # All queries that share a KV head, of all readers, are one query sequence for the kernel.
    query = grouped[span.readers].transpose(0, 1).flatten(1, 2)
    pages = slice(span.first_page, span.first_page + span.num_pages)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.expand(span.num_pages, *query.shape),
        keys[pages, :, : span.num_tokens],
        values[pages, :, : span.num_tokens],
        scale=scaling,
    )
    output = output.unflatten(2, (num_readers, -1)).transpose(1, 2).flatten(0, 1)
    return output, log_sum.unflatten(2, (num_readers, -1)).transpose(1, 2).flatten(0, 1)


def _join(outputs: Tensor, log_sums: Tensor, segments: Tensor, num_queries: int) -> Tensor:
    """The softmax over all rows of a segment, from each row's softmax and log-sum-exp; in float32."""
    shape = (num_queries, *log_sums.shape[1:])
    rows = segments.view(-1, *(1 for _ in shape[1:])).expand_as(log_sums)
    highest = log_sums.new_full(shape, -torch.inf).scatter_reduce_(0, rows, log_sums, "amax")
    weights = torch.exp(log_sums - highest[segments])
    total = weights.new_zeros(shape).index_add_(0, segments, weights)
    weighted = weights[..., None] * outputs
    summed = weighted.new_zeros(num_queries, *outputs.shape[1:]).index_add_(0, segments, weighted)
    return (summed / total[..., None]).to(outputs.dtype)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
