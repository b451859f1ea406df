"""Latents (DeepSeek-V3) are kept of a token: its keys and values are computed of them.

The model hands its latents to the cache, expands what it gets back, and attends to that: so the cache gives
it the latents of all sequences of the step, one after the other. A latent is a group with one KV head and no
values; the latents of a token (that of keys and values, and the rotated key) lie side by side in its slot.

Each step expands the whole context of each sequence, layer by layer. That is cheap beside a long chunk, and
dear for single tokens of long contexts.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.engine.torch.attention.gathered import gather
from services.engine.torch.attention.step_view import ChunkView, ReachView, StepView
from services.engine.torch.attention.stores import store


def store_and_gather(view: StepView, layer_idx: int, *latents: Tensor) -> tuple[Tensor, ...]:
    """Keep the step's latents, each [1, 1, total, its width], and return those of all contexts, in order.

    Each comes back as [1, 1, the contexts' tokens, its width].
    """
    of_reach, index = view.of_layer(layer_idx)
    keys, _ = of_reach.kv.layer(index)
    store(torch.cat(latents, dim=-1), keys, of_reach)
    gathered = torch.cat([gather(keys, chunk) for chunk in of_reach.chunks], dim=1)[None]
    each: tuple[Tensor, ...] = gathered.split([latent.shape[-1] for latent in latents], dim=-1)
    return each


def contexts(of_reach: ReachView) -> Iterator[tuple[ChunkView, slice]]:
    """Yield each chunk of the step, and where what it sees is in what store_and_gather gave."""
    end = 0
    for chunk in of_reach.chunks:
        start, end = end, end + chunk.num_seen
        yield chunk, slice(start, end)
