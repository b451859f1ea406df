"""This module converts a GGUF file to a checkpoint: names, weights and configuration. gguf_tokenizer.py makes
its tokenizer.

Names differ in such a file, and in the llama family so does the order of Q's and K's rows: transformers
rotates value i of a head with i + half, and llama.cpp rotates 2i with 2i + 1. llama.cpp's converter moves the
rows, so this moves them back.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.model.gguf import (
    Floats,
    Gguf,
    Metadata,
    Tensor,
    count,
    floats_of,
    number,
    tokens_of,
)
from services.model.gguf_tokenizer import generation_ids, token_ids, tokenizer_config, tokenizer_of
from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    model_type: str
    moves_rows: bool = False
    has_experts: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", moves_rows=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "qwen3_moe", has_experts=True),
}
_OF_A_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_OF_THE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later stretch slow frequencies; such a file has the resulting factors, not these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# With these values, of which the first is llama.cpp's default, the computation is the usual one.
_PLAIN = {
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight is a tensor of the checkpoint; with `num_heads`, its rows of so many heads are moved back."""

    name: str
    tensor: Tensor
    num_heads: int = 0

    def floats(self, data: Any) -> Floats:
        values = floats_of(data, self.tensor)
        return values if not self.num_heads else _rows_put_back(values, self.num_heads)


@dataclass(frozen=True, slots=True)
class GgufModel:
    weights: tuple[Weight, ...]
    tokenizer: str
    configs: Mapping[str, Mapping[str, Any]]


def model_of(
    gguf: Gguf, data: Any, dtype: str = "float32", sampling: Mapping[str, float] | None = None
) -> GgufModel:
    """Create a checkpoint from the file, whose bytes are `data`, to be served in `dtype`.

    `sampling` is what its publisher would sample by, for generation_config.json; GGUF has no place for it.

    Raises ConfigError where the family is not supported, or the file has something that would be lost.
    """
    metadata = gguf.metadata
    family = _family(metadata)
    weights = tuple(weights_of(gguf))
    sampled = {"do_sample": True, **sampling} if sampling else {}
    configs = {
        "config.json": _config(gguf, data, family) | {"dtype": dtype, **token_ids(metadata)},
        "tokenizer_config.json": tokenizer_config(metadata),
        "generation_config.json": {**generation_ids(metadata), **sampled},
    }
    return GgufModel(weights, tokenizer_of(metadata).to_str(), configs)


def weights_of(gguf: Gguf) -> Iterator[Weight]:
    """Yield the weights by their names in transformers, those of experts one by one.

    Raises ConfigError for a tensor without a place, or an unsupported family.
    """
    family = _family(gguf.metadata)
    heads = count(gguf.metadata, "attention.head_count")
    kv_heads = count(gguf.metadata, "attention.head_count_kv", heads)
    moved = {"attn_q": heads, "attn_k": kv_heads} if family.moves_rows else {}
    for tensor in gguf.tensors:
        match tensor.name.split("."):
            case [part, "weight"] if part in _OF_THE_MODEL:
                _require_tokens(part, tensor, gguf.metadata)
                yield Weight(f"{_OF_THE_MODEL[part]}.weight", tensor)
            case ["blk", layer, part, kind] if part in _OF_A_LAYER and kind in ("weight", "bias"):
                _require_heads(tensor, moved.get(part, 0))
                name = f"model.layers.{layer}.{_OF_A_LAYER[part]}.{kind}"
                yield Weight(name, tensor, moved.get(part, 0))
            case ["blk", layer, part, "weight"] if part in _OF_EXPERTS and family.has_experts:
                for i, own in enumerate(_of_each_expert(tensor)):
                    yield Weight(f"model.layers.{layer}.mlp.experts.{i}.{_OF_EXPERTS[part]}.weight", own)
            case [*_] if tensor.name == _FACTORS and family.moves_rows:
                continue
            case _:
                raise ConfigError(f"the GGUF file has a tensor {tensor.name}, which cannot be converted")


def _family(metadata: Metadata) -> _Family:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"the GGUF file is of the family {name!r}; read are {known}")
    family = _FAMILIES[name]
    if count(metadata, "expert_count", 0) and not family.has_experts:
        raise ConfigError("the GGUF file is of a model with experts, which cannot be converted")
    _require_plain(metadata)
    if count(metadata, "attention.sliding_window", 0):
        raise ConfigError("the GGUF file is of a model with windows, which cannot be converted")
    if not count(metadata, "attention.head_count") or not count(metadata, "attention.head_count_kv", 1):
        raise ConfigError("the GGUF file is damaged: it states no heads of attention")
    head_dim = _head_dim(metadata)
    if count(metadata, "rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("the GGUF file turns a part of each head only, which cannot be converted")
    if count(metadata, "attention.value_length", head_dim) != head_dim:
        raise ConfigError("the GGUF file has values of another length than its keys, which is not served")
    return family


def _require_plain(metadata: Metadata) -> None:
    """Refuse settings that change the model and differ from llama.cpp's defaults.

    Without a type of scaling llama.cpp assumes linear, by a factor under one of two names.
    """
    family = metadata["general.architecture"]
    scaling = metadata.get(f"{family}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise ConfigError(f"the GGUF file scales its rotation ({scaling}), which cannot be converted")
    if scaling == "linear":
        factor = number(metadata, "rope.scaling.factor", number(metadata, "rope.scale_linear", 0.0))
        if factor not in (0, 1):
            raise ConfigError(f"the GGUF file scales its rotation (by {factor}), which cannot be converted")
    if metadata.get(f"{family}.attention.causal", True) is not True:
        raise ConfigError("the GGUF file is of a model that attends in both directions, which is not served")
    for name, plain in _PLAIN.items():
        if number(metadata, name, plain[0]) not in plain:
            stated = f"{family}.{name}={metadata[f'{family}.{name}']!r}"
            raise ConfigError(f"the GGUF file states {stated}, which cannot be converted")


def _require_tokens(part: str, tensor: Tensor, metadata: Metadata) -> None:
    if part in ("token_embd", "output") and tensor.shape[0] != len(tokens_of(metadata)):
        raise ConfigError(f"the GGUF file is damaged: {tensor.name} has another length than its tokens")


def _require_heads(tensor: Tensor, num_heads: int) -> None:
    if num_heads and tensor.shape[0] % (2 * num_heads):
        raise ConfigError(f"the GGUF file is damaged: {tensor.name} has no rows of {num_heads} heads")


def _of_each_expert(tensor: Tensor) -> Iterator[Tensor]:
    if len(tensor.shape) != 3:
        raise ConfigError(f"the GGUF file is damaged: {tensor.name} is not of experts")
    size = tensor.num_bytes // tensor.shape[0]
    for i in range(tensor.shape[0]):
        yield replace(tensor, shape=tensor.shape[1:], start=tensor.start + i * size)


def _rows_put_back(values: Floats, num_heads: int) -> Floats:
    heads = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def _config(gguf: Gguf, data: Any, family: _Family) -> dict[str, Any]:
    metadata, heads = gguf.metadata, count(gguf.metadata, "attention.head_count")
    names = {tensor.name for tensor in gguf.tensors}
    theta = number(metadata, "rope.freq_base", 10_000.0)
    if not theta:
        raise ConfigError("the GGUF file is damaged: its rope.freq_base is 0")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": False,
        "hidden_size": count(metadata, "embedding_length"),
        "intermediate_size": count(metadata, "feed_forward_length"),
        "num_hidden_layers": count(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count(metadata, "attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": count(metadata, "context_length"),
        "rms_norm_eps": _short(number(metadata, "attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "vocab_size": len(tokens_of(metadata)),
        "tie_word_embeddings": "output.weight" not in names,
    }
    factors = next((tensor for tensor in gguf.tensors if tensor.name == _FACTORS), None)
    if factors is not None:
        config["rope_scaling"] = _stretching(floats_of(data, factors), theta, _head_dim(metadata))
    if family.has_experts:
        config |= {
            "num_experts": count(metadata, "expert_count"),
            "num_experts_per_tok": count(metadata, "expert_used_count"),
            "moe_intermediate_size": count(metadata, "expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _stretching(factors: Floats, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings that lead to the factors, which are found by trying."""
    factor = round(float(factors.max(initial=0.0)), 3)
    own = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    low, high, original = _LLAMA3.values()
    expected = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (i / head_dim)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / max(factor, 1.0) + smooth))
    if factor < 1 or factors.shape != (len(expected),) or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(f"the GGUF file's {_FACTORS} scales its rotation otherwise than Llama 3 does")
    return own


def _head_dim(metadata: Metadata) -> int:
    whole = count(metadata, "embedding_length") // count(metadata, "attention.head_count")
    return count(metadata, "attention.key_length", whole)


def _short(value: float) -> float:
    """Return the number as it was before it was stored in float32."""
    return float(f"{value:.6g}")
