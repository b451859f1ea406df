"""Attention over the paged KV pool, for Hugging Face model definitions.

    view_step(pool, chunks)   once a step (step_view.py): where K and V go, who reads which pages
    model(..., paged=view)    transformers hands our keyword to the attention function of each layer
      paged_attention         1. store the step's K and V in their pages
                              2. chunks of several tokens: gather the sequence's K and V, attend causally
                              3. single tokens: attend to pages where they lie, by the kernel that was chosen
                                 at start (in_place.py); without one, as 2.

The packed tokens of a step are one row: input_ids and position_ids are [1, total]. For an attention
implementation it does not know, transformers passes attention_mask None; the view says it all.

Attending in place never copies a prefix. Pages that several sequences read are read once, for all of them;
what a sequence reads alone and what it shares is joined by the log-sum-exps (Milakov and Gimelshein, arXiv
1805.02867). Keys carry their positions already (rotary embedding), so pages may be taken in any order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.engine.torch.attention.decode_kernel import attend_pages
from services.engine.torch.attention.parts import PartsView
from services.engine.torch.attention.step_view import ChunkView, DecodeView, StepView
from services.engine.torch.lanes import HAS_FLOAT16

IMPLEMENTATION = "isthmus_paged"
# What decode_kernel reads, and what it takes their numbers for.
_NUMPY_VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}
if HAS_FLOAT16:
    _NUMPY_VIEWS[torch.float16] = torch.int16
IN_PLACE_DTYPES = tuple(_NUMPY_VIEWS)


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
    if isinstance(paged.decode, DecodeView) and not paged.chunks:
        return attend_in_place(queries, paged.decode, paged.kv, module.layer_idx, scaling)[None], None
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for chunk in paged.chunks:
        rows = slice(chunk.offset, chunk.offset + chunk.length)
        output[rows] = attend_gathered(queries[rows], keys, values, chunk, scaling)
    if isinstance(paged.decode, PartsView):
        paged.decode.attend(paged.decode, queries, paged.kv, module.layer_idx, scaling, output)
    elif paged.decode is not None:
        offsets = paged.decode.offsets
        output[offsets] = attend_in_place(queries[offsets], paged.decode, paged.kv, module.layer_idx, scaling)
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
    # By heads, then pages: so it is copied once, not a second time to put the heads first. Selected from the
    # transposed pool instead, torch would copy all of that.
    own = pages.new_empty(pages.shape[1], len(chunk.pages), *pages.shape[2:])
    torch.index_select(pages, 0, chunk.pages, out=own.transpose(0, 1))
    return own.flatten(1, 2)[:, None, : chunk.end]


def attend_in_place(query: Tensor, view: DecodeView, kv: Tensor, layer: int, scaling: float) -> Tensor:
    """`query` and the result are [num_queries, num_heads, head_dim]; `kv` is the pool."""
    output = attend_pages(
        query.float().numpy(),
        kv.view(_NUMPY_VIEWS[kv.dtype]).numpy(),
        layer,
        view.pieces,
        view.joins,
        scaling,
        shares=view.shares,
        executor=view.executor,
    )
    return torch.from_numpy(output).to(query.dtype)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
