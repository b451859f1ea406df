"""The batch of `bench.engine.Transformers` with a StaticCache, its whole step captured in one CUDA graph.

transformers itself captures nothing by hand: it asks for torch.compile, whose first step takes a minute. Its
continuous batching is left out, for without the flash-attn package it attends by sdpa and captures nothing.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, StaticCache

from bench.engine import FIRST_ID, _gather
from bench.gpu.captured import Captured
from services.engine.torch.attention.paged_kv import PagedKv
from services.values.kv import PageId


class StaticTransformers:
    """It has room for `num_steps` steps beyond `context`."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: PagedKv,
        tables: Sequence[list[PageId]],
        context: int,
        num_steps: int,
    ) -> None:
        self._model, device = model, model.device
        room = -(-(context + num_steps) // 64) * 64  # kernels with masks want even rows
        self._cache = StaticCache(config=model.config, max_cache_len=room)
        for layer in range(kv.shape.num_layers):
            key, value = (_gather(pages, tables, context) for pages in kv.layer(layer))
            self._cache.update(key, value, layer)
        first_ids = range(FIRST_ID, FIRST_ID + len(tables))
        self._ids = torch.tensor(first_ids, device=device)[:, None]
        self._positions = torch.full((len(tables), 1), context, device=device)
        self._places = torch.arange(room, device=device)[None, None, None]
        self._mask = torch.zeros(len(tables), 1, 1, room, dtype=torch.bool, device=device)
        self._graph = Captured(self._compute, device)
        self._ids.copy_(torch.tensor(first_ids, device=device)[:, None])
        self._positions.fill_(context)
        for layer_cache in self._cache.layers:
            layer_cache.cumulative_length.fill_(context)

    @torch.inference_mode()
    def _compute(self) -> None:
        torch.le(self._places, self._positions[:, None, None], out=self._mask)
        outputs = self._model(
            input_ids=self._ids,
            position_ids=self._positions,
            attention_mask=self._mask,
            past_key_values=self._cache,
            logits_to_keep=1,
        )
        self._ids.copy_(outputs.logits[:, -1].argmax(-1, keepdim=True))
        self._positions.add_(1)

    def step(self) -> list[int]:
        self._graph.replay()
        chosen: list[int] = self._ids[:, 0].tolist()
        return chosen
