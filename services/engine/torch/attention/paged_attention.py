"""Hugging Face model definitions attend over paged KV pools here.

    view_step(layers, chunks, cache)   once a step (step_view.py): where K and V go, who reads which pages
    model(..., paged=view)             transformers hands our keyword to the attention function of each layer
      cache.update(key, value, idx)    which layer it is: module.layer_idx does not say it everywhere
      paged_attention                  1. store the step's K and V in their pages
                                       2. attend to pages where they lie, by the kernel that was chosen at
                                          start (in_place.py): on a CPU all tokens, on a GPU single ones
                                       3. where there is none: gather what all chunks see, attend at once
                                          (prompts.py), or chunk by chunk (gathered.py)

The packed tokens of a step are one row: input_ids and position_ids are [1, total]. For an attention
implementation it does not know, transformers passes attention_mask None; the view says it all.

Attending in place never copies a prefix. Pages that several sequences read are read once, for all of them. On
a CPU what a token gets is the same to the bit, whoever else is in the step and however its prompt is cut
(numba_kernel.py). On a GPU what a sequence reads alone and what it shares is joined by the log-sum-exps
(Milakov and Gimelshein, arXiv 1805.02867), so it is the same up to rounding. Keys carry their positions
already (rotary embedding), so pages may be taken in any order.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from services.engine.torch.attention.attention_scores import Scores
from services.engine.torch.attention.gathered import attend_gathered, gather
from services.engine.torch.attention.kernels.numba_kernel import Floats, attend_pages
from services.engine.torch.attention.kernels.piece_parts import PartsView
from services.engine.torch.attention.latent import contexts
from services.engine.torch.attention.layers import Reach
from services.engine.torch.attention.prompts import attend_packed
from services.engine.torch.attention.step_view import InPlaceView, ReachView, StepView
from services.engine.torch.attention.stores import store_layer
from services.values.errors import ConfigError
from services.values.kv import GroupKind

IMPLEMENTATION = "isthmus_paged"

# transformers and its models may hand these to an attention function without a say in what it computes: they
# are of training, of what else the model returns, and what the view knows better.
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
    """Compute one layer's attention, as transformers calls it, and write the pool.

    `query` is [1, num_heads, total, head_dim], `key` and `value` [1, num_kv_heads, total, ..]; of a latent,
    they are of all contexts, as store_and_gather gave them. Returns [1, total, num_heads, head dimension of
    the values].

    Raises ConfigError where the model asks for what is not computed here.
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
        # A row that is not stored sees what is in its page, and not its own.
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
    """Raise ConfigError for what is not known: were it ignored, the model would compute something else."""
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
    output = query.new_empty(*query.shape[:2], values.shape[2])
    for chunk, context in contexts(view):
        rows = slice(chunk.offset, chunk.offset + chunk.length)
        output[rows] = attend_gathered(query[rows], keys[:, context], values[:, context], chunk, scores)
    return output


def _attend_on_cpu(query: Tensor, view: ReachView, layer: int, scores: Scores) -> Tensor:
    """Attend with all tokens in place.

    numpy does it, each of whose calls takes a fourth of what one of torch's does.
    """
    queries: Floats = query.float().numpy()[0].transpose(1, 0, 2)
    parts = view.in_place
    if len(parts) == 1:  # the one part has all rows
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
