"""A decode step of a Llama written by hand, in one CUDA graph: the least that these weights and torch allow.

It is the upper bound of what an engine can reach with the same libraries: products of q, k and v and of gate
and up are merged, ids stay on the device, and the context has one length, so nothing is planned. It attends
either to contiguous K and V by torch's flash attention (`flash`), or to the runner's pages by its own kernel
(`paged`); `lean` computes rotation and activation by a Triton kernel each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from bench.engine import FIRST_ID, GREEDY, _gather
from bench.gpu.captured import Captured
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.page_pieces import PartsView
from services.engine.torch.attention.paged_attention import store_layer
from services.engine.torch.attention.paged_kv import PagedKv, Scores
from services.engine.torch.attention.step_view import PagedLayers, view_step
from services.values.kv import PageId

# Layer, query [rows, heads, dim], key and value [rows, kv_heads, dim]; the result is as the query.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Loop:
    """A batch whose step is always the one after `context` tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Sequence[LayerWeights],
        num_rows: int,
        context: int,
        attend: Attend,
        *,
        lean: bool = False,
    ) -> None:
        """Capture a step; `weights` are the model's, merged. Raises whatever capture raises."""
        self._config, device = model.config, model.device
        self._base: Any = model.base_model
        self._head = model.get_output_embeddings().weight
        self._layers = weights
        self._attend = attend
        self._rotate, self._activate = _lean() if lean else (_rotated, _activated)
        first_ids = list(range(FIRST_ID, FIRST_ID + num_rows))
        self._ids = torch.tensor(first_ids, device=device)
        self._cos, self._sin = _angles(model, context)
        self._graph = Captured(self._compute, device)
        self._ids.copy_(torch.tensor(first_ids, device=device))

    @torch.inference_mode()
    def _compute(self) -> None:
        config, eps = self._config, self._config.rms_norm_eps
        num_heads, num_kv_heads, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            (config.hidden_size,),
        )
        hidden = embedding(self._ids, self._base.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            qkv = linear(rms_norm(hidden, width, layer.norm, eps), layer.qkv)
            qkv = qkv.view(len(hidden), -1, config.head_dim)
            rotated = self._rotate(qkv[:, : num_heads + num_kv_heads], self._cos, self._sin)
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
            output = self._attend(index, query, key, qkv[:, num_heads + num_kv_heads :])
            hidden.addmm_(output.reshape(len(hidden), -1), layer.out.t())
            gate_up = linear(rms_norm(hidden, width, layer.mlp_norm, eps), layer.gate_up)
            hidden.addmm_(self._activate(gate_up), layer.down.t())
        logits = linear(rms_norm(hidden, width, self._base.norm.weight, eps), self._head)
        self._ids.copy_(logits.argmax(-1))

    def step(self) -> list[int]:
        self._graph.replay()
        chosen: list[int] = self._ids.tolist()
        return chosen


def merged(model: PreTrainedModel) -> list[LayerWeights]:
    base: Any = model.base_model
    return [_merged(layer) for layer in base.layers]


def _merged(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        torch.cat([each.weight.detach() for each in projections]),
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        mlp.down_proj.weight.detach(),
    )


def _angles(model: PreTrainedModel, position: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of one position, [head_dim / 2]."""
    config, device = model.config, model.device
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = position / config.rope_parameters["rope_theta"] ** exponents
    return angles.cos().to(model.dtype), angles.sin().to(model.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat(
        (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)), -1
    )


def _activated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def _lean() -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Raises ImportError where there is no Triton."""
    kernels = import_module("bench.gpu.loop_kernels")
    return kernels.rotated, kernels.activated


def flash(kv: PagedKv, tables: Sequence[list[PageId]], context: int) -> Attend:
    """Attend to a contiguous copy of the pages' K and V."""
    copies = []
    for layer in range(kv.shape.num_layers):
        keys, values = (_gather(pages, tables, context) for pages in kv.layer(layer))
        room = keys.new_empty(2, *keys.shape[:2], context + 1, keys.shape[3])
        room[0, :, :, :context], room[1, :, :, :context] = keys, values
        copies.append(room)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = copies[layer]
        keys[:, :, context], values[:, :, context] = key, value
        return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    return attend


def paged(layers: PagedLayers, tables: Sequence[list[PageId]], context: int) -> Attend:
    """Attend to pages by the runner's own kernel, by a plan that is made once.

    Raises NotImplementedError where the runner does not attend so.
    """
    chunks = [Chunk([FIRST_ID], context, table, True, GREEDY) for table in tables]
    view = view_step(layers, chunks, _AllStored())

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        reach, index = view.of_layer(layer)
        assert isinstance(reach.decode, PartsView)
        store_layer(key.transpose(0, 1)[None], value.transpose(0, 1)[None], reach, index)
        output = query.new_empty(query.shape)
        scores = Scores(query.shape[-1] ** -0.5, None, None)
        reach.decode.attend(reach.decode, query, reach.kv, index, scores, output)
        return output

    if not isinstance(view.of_layer(0)[0].decode, PartsView):
        raise NotImplementedError("this runner's single tokens do not attend by a kernel of the device")
    return attend


class _AllStored:
    def take(self) -> tuple[int, bool]:
        raise AssertionError("the loop tells the layer itself")
