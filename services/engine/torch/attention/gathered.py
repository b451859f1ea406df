"""One chunk attends to K and V that were copied together; this needs nothing but torch.

torch's own attention knows neither soft caps nor sinks; where a layer has one, scores are made one by one.

On a GPU it gets no mask of ours either. The kernel that torch has there for masks was wrong for short chunks
far into a window, and some shapes made it read where nothing is (torch 2.11 on an H100; alike
pytorch/pytorch#191937). So where windows cut what a chunk sees, scores are made there. Few come here in half
precision, for prompts attend together then (prompts.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.torch.attention.attention_scores import Scores
from services.engine.torch.attention.step_view import ChunkView, seen_by

# So many bytes of scores are held at once, float32: so many rows of a chunk are computed together. On a CPU
# they are as many as its caches hold, for they are gone over six times; on a GPU enough for all its
# processors.
_SCORE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def gather(pages: Tensor, chunk: ChunkView) -> Tensor:
    """Return what the chunk sees of K or V, in token order: [num_kv_heads, end - first, head_dim]."""
    # The pages are selected by heads first: so they are copied once, not a second time to put the heads
    # first. Selected from the transposed pool instead, torch would copy all of that.
    numbers, pages = pages.dtype, pages.view(torch.uint8) if pages.itemsize == 1 else pages
    own = pages.new_empty(pages.shape[1], len(chunk.pages), *pages.shape[2:])
    torch.index_select(pages, 0, chunk.pages, out=own.transpose(0, 1))
    return own.view(numbers).flatten(1, 2)[:, chunk.skip : chunk.skip + chunk.num_seen]


def attend_gathered(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkView, scores: Scores) -> Tensor:
    """Let a chunk attend to what was copied for it.

    `query` is [length, num_heads, head_dim], `keys` and `values` are [num_kv_heads, end - first, ..].

    Returns [length, num_heads, head dimension of the values].
    """
    cut_on_gpu = chunk.in_windows and query.is_cuda
    # KV heads are the batch, the query heads of a group its heads: nothing is repeated for GQA.
    grouped = query.transpose(0, 1).unflatten(0, (len(keys), -1))
    attend = _attend if scores.are_plain and not cut_on_gpu else _attend_by_scores
    return attend(grouped, keys, values, chunk, scores).flatten(0, 1).transpose(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkView, scores: Scores) -> Tensor:
    group = query.shape[1]
    return scaled_dot_product_attention(
        query,
        keys[:, None].expand(-1, group, -1, -1),
        values[:, None].expand(-1, group, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.is_causal and chunk.length > 1,
        scale=scores.scaling,
    )


def _attend_by_scores(
    query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkView, scores: Scores
) -> Tensor:
    """Compute what `_attend` does in float32, some rows of the chunk after others: each with what it sees."""
    num_kv_heads, group = query.shape[:2]
    keys, values = keys.float().transpose(1, 2), values.float()
    score_bytes = 4 * num_kv_heads * group * chunk.num_seen
    num_rows = max(1, _SCORE_BYTES[query.device.type] // score_bytes)
    outputs = []
    for offset in range(0, chunk.length, num_rows):
        rows = query[:, :, offset : offset + num_rows].float()
        start = chunk.end - chunk.length + offset
        end = start + rows.shape[2]
        first = max(chunk.first, chunk.reach.first_seen(start))
        of_rows = slice(first - chunk.first, end - chunk.first)
        seen = seen_by(torch.arange(start, end, device=rows.device), chunk.reach, first, end)
        # A group's heads are taken as more rows: K and V are not repeated for them.
        products = (rows.flatten(1, 2) @ keys[:, :, of_rows]).unflatten(1, (group, -1))
        weights = _weights(products, seen, scores).flatten(1, 2)
        outputs.append((weights @ values[:, of_rows]).unflatten(1, (group, -1)))
    return torch.cat(outputs, dim=2).to(query.dtype)


def _weights(products: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Return the softmax of products [num_kv_heads, group, length, num_seen] over what each token sees."""
    if scores.softcap is None:
        capped = products.mul_(scores.scaling)
    else:
        capped = products.mul_(scores.scaling / scores.softcap).tanh_().mul_(scores.softcap)
    capped.masked_fill_(~seen, -torch.inf)
    if scores.sinks is None:
        return capped.softmax(-1)
    # A sink is one more score, of a token without a value.
    sinks = scores.sinks.float().view(*capped.shape[:2], 1, 1).expand(*capped.shape[:3], 1)
    return torch.cat([capped, sinks], dim=-1).softmax(-1)[..., :-1]
