"""transformers has other ways to generate than its eager forward: these are two that peers of ours use.

`StaticTransformers` has the batch of `bench.engine.Transformers` in a StaticCache and captures its whole step
in one CUDA graph, if asked to after torch.compile, for which transformers itself made that cache.
`gaps_of_continuous_batching` times transformers' own server loop. Without a flash attention package that loop
attends by sdpa, and then it captures no graphs.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, StaticCache

from bench.engine import FIRST_ID, _gather
from bench.gpu.captured import Captured
from services.engine.torch.attention.paged_kv import PagedKv
from services.values.kv import PageId


class StaticTransformers:
    """It has room for `num_steps` steps beyond `context`.

    With `compiles` the forward pass goes through torch.compile in its default mode; on a CPU, where this is
    a rehearsal, it is traced and not compiled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: PagedKv,
        tables: Sequence[list[PageId]],
        context: int,
        num_steps: int,
        *,
        compiles: bool = False,
    ) -> None:
        device = model.device
        backend = "eager" if device.type == "cpu" else "inductor"
        self._model = torch.compile(model, backend=backend, dynamic=False) if compiles else model
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


def gaps_of_continuous_batching(
    model: PreTrainedModel, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[float], str]:
    """Return the seconds between tokens of the prompt that was begun last, and how it attended.

    All prompts are of one length, and each gets `num_tokens`. Raises RuntimeError where a request failed.
    """
    page_size, length = 256, len(prompts[0]) + num_tokens
    config = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=len(prompts) * -(-length // page_size) + 8,
        max_batch_tokens=max(2048, len(prompts)),
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1)
    before = model.config._attn_implementation
    try:
        outputs = model.generate_batch(
            inputs=[list(ids) for ids in prompts],
            generation_config=greedy,
            continuous_batching_config=config,
            record_timestamps=True,
        )
    finally:
        attends = model.config._attn_implementation
        model.set_attn_implementation(before)
    failed = [output.error for output in outputs.values() if output.error]
    if failed or len(outputs) < len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} requests came back: {failed[:1]}")
    last = max((output.timestamps for output in outputs.values()), key=lambda times: times[0])
    return [later - earlier for earlier, later in pairwise(last)], attends
