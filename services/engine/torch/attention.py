"""Attention over the paged KV pool, for Hugging Face model definitions.

    view_step(pool, chunks)   once a step (step_view.py): where K and V go, who reads which pages
    model(..., paged=view)    transformers hands our keyword to the attention function of each layer
      paged_attention         1. store the step's K and V in their pages
                              2. chunks of several tokens: gather the sequence's K and V, attend causally
                              3. single tokens: the same, or (on CPU) attend page by page where they lie

The packed tokens of a step are one row: input_ids and position_ids are [1, total]. For an attention
implementation it does not know, transformers passes attention_mask None; the view says it all.

Attending in place never copies a prefix. Neighbouring pages are one strided tensor with pages as the
batch dimension; each page yields its own softmax, and the pages of a sequence are joined by their
log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867). Keys carry their positions already (rotary
embedding), so pages may be taken in any order, and a page that several sequences read is read once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from services.engine.torch.step_view import ChunkView, DecodeView, PageCopies, PageRun, StepView

IMPLEMENTATION = "isthmus_paged"

# Below this a page is too little work for a softmax of its own: gathering is cheaper.
MIN_PAGE_SIZE_IN_PLACE = 16

# A row for each page, reader and head: outputs [rows, head_dim], and in float32 log-sum-exps [rows].
_Rows = tuple[Tensor, Tensor]


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
    if paged.decode is not None and not paged.chunks:
        return attend_in_place(queries, keys, values, paged.decode, scaling)[None], None
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
    grouped = query.unflatten(1, (keys.shape[1], -1)).transpose(1, 2).contiguous()
    rows = [_attend_run(grouped, keys, values, run, scaling) for run in view.runs]
    rows += [_attend_copies(grouped, keys, values, copies, scaling) for copies in view.copies]
    if view.nothing is not None:
        rows.append(view.nothing)
    joined = _join(rows, view.parts)
    return joined.view(grouped.shape).transpose(1, 2).flatten(1, 2).to(query.dtype)


def _attend_run(grouped: Tensor, keys: Tensor, values: Tensor, run: PageRun, scaling: float) -> _Rows:
    pages = slice(run.first_page, run.first_page + run.num_pages)
    query = grouped[run.readers].flatten(1, 2).expand(run.num_pages, -1, -1, -1)
    return _attend_pages(query, keys[pages], values[pages], run.mask, scaling)


def _attend_copies(
    grouped: Tensor, keys: Tensor, values: Tensor, copies: PageCopies, scaling: float
) -> _Rows:
    key, value = (pages[:, :, : copies.num_tokens].index_select(0, copies.pages) for pages in (keys, values))
    return _attend_pages(grouped[copies.readers].flatten(1, 2), key, value, copies.mask, scaling)


def _attend_pages(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> _Rows:
    """`query` is [num_pages, readers * group, num_kv_heads, head_dim], and so are the rows."""
    # All queries that share a KV head, of all readers, are one query sequence for the kernel.
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(1, 2), keys, values, attn_mask=mask, scale=scaling
    )
    return output.transpose(1, 2).flatten(0, 2), log_sum.transpose(1, 2).flatten()


def _join(rows: Sequence[_Rows], parts: Tensor) -> Tensor:
    """The softmax over all parts of a head, from each part's softmax and log-sum-exp; in float32.

    `parts` is that of DecodeView, the result [num_queries * num_heads, head_dim].
    """
    outputs, log_sums = (torch.cat(part) for part in zip(*rows, strict=True)) if len(rows) > 1 else rows[0]
    weights = log_sums[parts].softmax(dim=1)
    return embedding_bag(parts, outputs.float(), mode="sum", per_sample_weights=weights)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
