"""Hugging Face model definitions attend over paged KV pools through this module.

`view_step(layers, chunks, cache)` runs once per step (step_view.py) and finds where K and V go, and who reads
which pages. `model(..., paged=view)` then passes this keyword to the attention function of each layer. There,
`cache.update(key, value, idx)` names the layer, as module.layer_idx is not right in all definitions, and
`paged_attention` does three things:

1. It stores the step's K and V in their pages.
2. It attends to pages in place, with the kernel chosen at the start (kernel_choice.py): on a CPU for all
   tokens, on a GPU for single ones.
3. Without a kernel it gathers what all chunks see and attends at once (prompts.py), or chunk by chunk.

The packed tokens of a step are one row: input_ids and position_ids are [1, total]. For an attention
implementation that it does not know, transformers passes attention_mask None; the view has all that is
needed.

Attending in place never copies a prefix. Pages that several sequences read are read once for all of them. On
a CPU a token's result is the same to the bit, whatever else is in the step and however its prompt is cut
(cpu_attention_kernel.py). On a GPU a sequence's own pages and its shared ones are joined by log-sum-exps
(Milakov and Gimelshein, arXiv 1805.02867), so it is the same up to rounding. Keys already contain their
positions (rotary embedding), so pages may be read in any order.

When gathering, one chunk attends to a copy of its K and V, and this needs only torch. torch's own attention
supports neither soft caps nor sinks: for a layer with one, scores are computed explicitly. On a GPU torch
gets no mask from here either. Its kernel for masks was wrong for short chunks far into a window, and with
some shapes it read invalid addresses (torch 2.11 on an H100; pytorch/pytorch#191937 is similar). So where
windows cut what a chunk sees, scores are computed explicitly there. Few chunks in half precision need this,
since their prompts attend together.

Latents (DeepSeek-V3) are stored per token, and keys and values are computed from them. The model passes its
latents to the cache, expands what it gets back, and attends to that: so the cache returns the latents of all
sequences of the step, one after the other. A latent is a group with one KV head and no values; the latents of
a token (the one of keys and values, and the rotated key) lie side by side in its slot. Each step expands the
whole context of each sequence, layer by layer. That is cheap beside a long chunk, and expensive for single
tokens of long contexts. In a graph the step has room for a fixed number of tokens of contexts, which are
gathered at once and attended to by flash attention.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.engine.torch.attention.cpu_attention_kernel import Floats, attend_pages, store_tokens
from services.engine.torch.attention.page_pieces import PartsView
from services.engine.torch.attention.paged_kv import Scores
from services.engine.torch.attention.prompts import attend_packed, attend_to
from services.engine.torch.attention.step_view import (
    ChunkView,
    InPlaceView,
    Reach,
    ReachView,
    StepView,
    as_numpy,
    seen_by,
)
from services.values.errors import ConfigError
from services.values.kv import GroupKind


def store_layer(key: Tensor, value: Tensor, view: ReachView, layer: int) -> None:
    """Store the step's `key` and `value`, [1, num_kv_heads, total, ..]; `layer` is one of the pool's."""
    if view.numbers is not None:
        key, value = view.kv.rounded(key), view.kv.rounded(value)
        keys, values = (as_numpy(numbers)[0].transpose(1, 0, 2) for numbers in (key, value))
        store_tokens(keys, values, view.numbers, view.kv.shape, layer, view.slots)
        return
    if view.store is not None:
        view.store(key[0].transpose(0, 1), value[0].transpose(0, 1), view.kv, layer, *view.slot_tensors)
        return
    for numbers, pages in zip((key, value), view.kv.layer(layer), strict=True):
        store(view.kv.rounded(numbers), pages, view)


def store(numbers: Tensor, pages: Tensor, view: ReachView) -> None:
    """Store the step's `numbers`, [1, num_kv_heads, total, head_dim]; `pages` are a layer's K or V."""
    rows, token_pages, token_slots = view.slot_tensors
    of_tokens = numbers[0].transpose(0, 1)
    if len(rows) < len(of_tokens) or view.static_slots is not None:
        of_tokens = of_tokens[rows]
    put(of_tokens, pages, token_pages, token_slots)


def put(numbers: Tensor, pages: Tensor, token_pages: Tensor, token_slots: Tensor) -> None:
    """Put [num_tokens, num_kv_heads, head_dim] into a layer's pages, each token's into its page and slot."""
    if pages.itemsize == 1:  # torch supports index assignment for bytes, but for no other type of 8 bits.
        pages, numbers = pages.view(torch.uint8), numbers.view(torch.uint8)
    pages[token_pages, :, token_slots] = numbers


# So many bytes of float32 scores exist at once, which limits the rows of a chunk that are computed together.
# On a CPU that is what its caches hold, as six passes read them; on a GPU it is enough for all its
# processors.
_SCORE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def gather(pages: Tensor, chunk: ChunkView) -> Tensor:
    """Return what the chunk sees of K or V, in token order: [num_kv_heads, end - first, head_dim]."""
    # The output has the heads first, so that the pages are copied once, without a second copy to reorder
    # them. If they were selected from the transposed pool instead, torch would copy the whole pool.
    numbers, pages = pages.dtype, pages.view(torch.uint8) if pages.itemsize == 1 else pages
    own = pages.new_empty(pages.shape[1], len(chunk.pages), *pages.shape[2:])
    torch.index_select(pages, 0, chunk.pages, out=own.transpose(0, 1))
    return own.view(numbers).flatten(1, 2)[:, chunk.skip : chunk.skip + chunk.num_seen]


def attend_gathered(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkView, scores: Scores) -> Tensor:
    """Let a chunk attend to the K and V that were copied for it.

    `query` is [length, num_heads, head_dim], `keys` and `values` are [num_kv_heads, end - first, ..]. Returns
    [length, num_heads, head dimension of the values].
    """
    cut_on_gpu = chunk.in_windows and query.is_cuda
    # KV heads are the batch, and a group's query heads are its heads: so nothing is repeated for GQA.
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
    """Compute what `_attend` does in float32, a few rows of the chunk at a time, each with what it sees."""
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
        # A group's heads become more rows, so K and V are not repeated for them.
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


def store_and_gather(view: StepView, layer_idx: int, *latents: Tensor) -> tuple[Tensor, ...]:
    """Store the step's latents, each [1, 1, total, its width], and return those of all contexts, in order.

    Each result is [1, 1, the contexts' tokens, its width]; a step of fixed size has room for more tokens.
    """
    of_reach, index = view.of_layer(layer_idx)
    keys, _ = of_reach.kv.layer(index)
    store(torch.cat(latents, dim=-1), keys, of_reach)
    if of_reach.static_packed is not None:
        (call,) = of_reach.static_packed.calls
        packed, _ = of_reach.static_packed.packing.gather(call.reads, call.num_seen, of_reach.kv, index)
        gathered = packed.transpose(0, 1)[None]
    else:
        gathered = torch.cat([gather(keys, chunk) for chunk in of_reach.chunks], dim=1)[None]
    each: tuple[Tensor, ...] = gathered.split([latent.shape[-1] for latent in latents], dim=-1)
    return each


def contexts(of_reach: ReachView) -> Iterator[tuple[ChunkView, slice]]:
    """Yield each chunk of the step, and the slice of its tokens in the result of store_and_gather."""
    end = 0
    for chunk in of_reach.chunks:
        start, end = end, end + chunk.num_seen
        yield chunk, slice(start, end)


IMPLEMENTATION = "isthmus_paged"

# transformers and its models may pass these to an attention function without an effect on its result: they
# are for training, for other outputs of the model, or repeat what the view has.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: StepView,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention, as transformers calls it, and write K and V to the pool.

    `query` is [1, num_heads, total, head_dim], `key` and `value` [1, num_kv_heads, total, ..]; of a latent,
    they are those of all contexts, as store_and_gather returned them. Returns [1, total, num_heads, head
    dimension of the values].

    Raises ConfigError where the model needs something that is not supported here.
    """
    _require_known(module, attention_mask, is_causal, others)
    layer_idx, is_stored = paged.cache.take()
    view, index = paged.of_layer(layer_idx)
    _require_window(paged.layers.places[layer_idx].reach, sliding_window)
    scores = Scores(scaling, softcap, s_aux)
    if is_stored and not view.kv.is_latent:
        store_layer(key, value, view, index)
    if view.numbers is not None:
        return _attend_on_cpu(query, view, index, scores), None
    queries = query[0].transpose(0, 1)
    if view.kv.is_latent:
        return _attend_to_contexts(queries, key[0], value[0], view, scores)[None], None
    if view.packed is not None and view.packed.serves(scores):
        # A row that is not stored sees the K and V in its page, and not its own.
        are_stored = is_stored and len(view.slots.rows) == len(queries)
        own = (key[0].transpose(0, 1), value[0].transpose(0, 1)) if are_stored else None
        output = attend_packed(view.packed, queries, own, view.kv, index, scores)
    elif view.static_packed is None:
        output = _attend_by_chunks(queries, view, index, scores)
    else:
        raise ConfigError(f"prompts of a fixed size cannot attend together with {scores}")
    if isinstance(view.decode, PartsView):
        view.decode.attend(view.decode, queries, view.kv, index, scores, output)
    return output[None], None


def _require_known(
    module: torch.nn.Module, mask: Tensor | None, is_causal: bool | None, others: dict[str, Any]
) -> None:
    """Raise ConfigError for an unknown argument; without it the model would compute something else."""
    unknown = {name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None}
    if mask is not None:
        unknown.add("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.add("is_causal=False")
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} attends with {', '.join(sorted(unknown))}, which is not supported"
        )


def _require_window(reach: Reach, sliding_window: int | None) -> None:
    known = reach.window if reach.kind is GroupKind.SLIDING_WINDOW else None
    if sliding_window is not None and sliding_window != known:
        raise ConfigError(f"a layer attends to a window of {sliding_window} tokens, and is taken for {reach}")


def _attend_by_chunks(query: Tensor, view: ReachView, layer: int, scores: Scores) -> Tensor:
    keys, values = view.kv.layer(layer)
    output = query.new_empty(*query.shape[:2], values.shape[3])
    for chunk in view.chunks:
        rows = slice(chunk.offset, chunk.offset + chunk.length)
        own_keys, own_values = (gather(pages, chunk).to(query.dtype) for pages in (keys, values))
        output[rows] = attend_gathered(query[rows], own_keys, own_values, chunk, scores)
    return output


def _attend_to_contexts(
    query: Tensor, keys: Tensor, values: Tensor, view: ReachView, scores: Scores
) -> Tensor:
    if (packed := view.static_packed) is not None:
        (call,) = packed.calls
        attended = attend_to(call, packed, query, keys.transpose(0, 1), values.transpose(0, 1), scores)
        return attended if packed.sources is None else attended[packed.sources]
    output = query.new_empty(*query.shape[:2], values.shape[2])
    for chunk, context in contexts(view):
        rows = slice(chunk.offset, chunk.offset + chunk.length)
        output[rows] = attend_gathered(query[rows], keys[:, context], values[:, context], chunk, scores)
    return output


def _attend_on_cpu(query: Tensor, view: ReachView, layer: int, scores: Scores) -> Tensor:
    """Attend with all tokens in place.

    This uses numpy, whose calls take a fourth of the time of torch's.
    """
    queries: Floats = query.float().numpy()[0].transpose(1, 0, 2)
    parts = view.in_place
    if len(parts) == 1:  # The one part has all rows.
        output = attend_in_place(queries, parts[0], view, layer, scores)
    else:
        output = np.empty((*queries.shape[:2], view.kv.shape.v_head_dim), np.float32)
        for part in parts:
            output[part.rows] = attend_in_place(queries[part.rows], part, view, layer, scores)
    return torch.from_numpy(output[None]).to(query.dtype)


def attend_in_place(
    queries: Floats, rows: InPlaceView, view: ReachView, layer: int, scores: Scores
) -> Floats:
    """Attend with `queries` [num_queries, num_heads, head_dim]; the result has the values' head dimension."""
    assert view.numbers is not None
    return attend_pages(
        queries,
        view.numbers,
        view.kv.shape,
        layer,
        rows.reads,
        scaling=scores.scaling,
        softcap=scores.softcap,
        sinks=None if scores.sinks is None else scores.sinks.detach().float().numpy(),
        shares=rows.shares,
        executor=rows.executor,
    )


AttentionInterface.register(IMPLEMENTATION, paged_attention)
