"""Families beside the plain decoders of `isthmus make-model`: windows, recurrent layers, experts, latents.

Small configs of the families by transformers' model types, and weights by which each early token, each state
and each window counts. A default initialisation hides them: a stale state changes the logits by 0.3 % then.

    recurrent   decays of 3 to some hundred tokens, side by side, so that a state of long ago is still seen
    experts     a router that is decided: a tie there swaps an expert, and float32 rounding must not
    attention   first layers mix widely, the last one looks sharply; a branch outweighs the residual
"""

import math
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from services.cli.model.make_model import Family, Sizes

_RECURRENT, _FULL, _SLIDING, _CHUNKED = (
    "linear_attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
)
_NUM_EXPERTS = 8

# Found by a random search over all families at hidden size 64: a changed token among 200, wherever it is,
# changes the last logits by 2 % of their standard deviation or more; float32 rounding by up to 2e-5.
_EMBEDDING_GAIN, _HEAD_GAIN, _BIAS_GAIN = 0.3, 3.0, 0.05
_QUERY_GAIN, _LAST_QUERY_GAIN = 0.5, 5.0
_OUTPUT_GAIN, _LAST_OUTPUT_GAIN = 5.0, 8.0
_MLP_GAIN, _LAST_MLP_GAIN = 4.0, 40.0
_ROUTER_GAIN = 8.0
_SMALLEST_DECAY, _LARGEST_DECAY = -3.0, 1.0  # natural logarithms
_STEP_BIAS = -2.5  # softplus of it, 0.08, times a decay: what a state forgets with a token


def _alternating(sizes: Sizes, other: str) -> list[str]:
    """Layer types: the last one full attention, and every second one before it."""
    return [other if (sizes.num_layers - i) % 2 == 0 else _FULL for i in range(sizes.num_layers)]


def _ropes(sizes: Sizes) -> dict[str, Any]:
    return {_SLIDING: sizes.rope, _FULL: sizes.rope}


def _experts(sizes: Sizes) -> dict[str, Any]:
    return dict(num_experts=_NUM_EXPERTS, num_experts_per_tok=2, moe_intermediate_size=sizes.hidden_size // 2)


def _local_experts(sizes: Sizes) -> dict[str, Any]:
    return dict(num_local_experts=_NUM_EXPERTS, num_experts_per_tok=2)


def _routed_experts(sizes: Sizes) -> dict[str, Any]:
    return dict(
        n_routed_experts=_NUM_EXPERTS, num_experts_per_tok=2, moe_intermediate_size=sizes.hidden_size // 2
    )


def _delta_net(sizes: Sizes) -> dict[str, Any]:
    return dict(
        linear_num_key_heads=sizes.num_kv_heads,
        linear_num_value_heads=sizes.num_heads,
        linear_key_head_dim=sizes.head_dim,
        linear_value_head_dim=sizes.head_dim,
        layer_types=_alternating(sizes, _RECURRENT),
    )


def _mamba(sizes: Sizes) -> dict[str, Any]:
    """Mamba-2's of twice the hidden size, as Bamba and Falcon-H1 name it."""
    return dict(
        mamba_n_heads=2 * sizes.num_heads,
        mamba_d_head=sizes.head_dim,
        mamba_d_state=sizes.head_dim,
        mamba_n_groups=sizes.num_kv_heads,
        mamba_expand=2,
        mamba_chunk_size=32,
    )


def _qwen3_5(sizes: Sizes) -> PreTrainedConfig:
    return transformers.Qwen3_5TextConfig(**sizes.layered, **_delta_net(sizes))


def _qwen3_5_moe(sizes: Sizes) -> PreTrainedConfig:
    shared = dict(shared_expert_intermediate_size=sizes.hidden_size // 2)
    return transformers.Qwen3_5MoeTextConfig(
        **sizes.layered, **_delta_net(sizes), **_experts(sizes), **shared
    )


def _qwen3_next(sizes: Sizes) -> PreTrainedConfig:
    shared = dict(shared_expert_intermediate_size=sizes.hidden_size // 2)
    return transformers.Qwen3NextConfig(**sizes.layered, **_delta_net(sizes), **_experts(sizes), **shared)


def _nemotron_h(sizes: Sizes) -> PreTrainedConfig:
    pattern = [_RECURRENT, "moe", _FULL, _RECURRENT, "mlp", _FULL]
    return transformers.NemotronHConfig(
        **sizes.common,
        **_routed_experts(sizes),
        head_dim=sizes.head_dim,
        layers_block_type=[pattern[i % len(pattern)] for i in range(sizes.num_layers)],
        mamba_num_heads=2 * sizes.num_heads,
        mamba_head_dim=sizes.head_dim,
        ssm_state_size=sizes.head_dim,
        n_groups=sizes.num_kv_heads,
        chunk_size=32,
        moe_shared_expert_intermediate_size=sizes.hidden_size // 2,
    )


def _falcon_h1(sizes: Sizes) -> PreTrainedConfig:
    return transformers.FalconH1Config(**sizes.layered, **_mamba(sizes), mamba_d_ssm=2 * sizes.hidden_size)


def _bamba(sizes: Sizes) -> PreTrainedConfig:
    attention = [i for i, kind in enumerate(_alternating(sizes, _RECURRENT)) if kind == _FULL]
    common = sizes.common | dict(num_hidden_layers=sizes.num_layers)
    return transformers.BambaConfig(**common, **_mamba(sizes), attn_layer_indices=attention)


def _jamba(sizes: Sizes) -> PreTrainedConfig:
    common = sizes.common | dict(num_hidden_layers=sizes.num_layers)
    return transformers.JambaConfig(
        **common,
        attn_layer_period=2,
        attn_layer_offset=(sizes.num_layers + 1) % 2,
        num_experts=_NUM_EXPERTS,
        mamba_d_state=8,
    )


def _gpt_oss(sizes: Sizes) -> PreTrainedConfig:
    types = _alternating(sizes, _SLIDING)
    return transformers.GptOssConfig(
        **sizes.layered, **_local_experts(sizes), sliding_window=sizes.window, layer_types=types
    )


def _gemma3(sizes: Sizes) -> PreTrainedConfig:
    return transformers.Gemma3TextConfig(
        **sizes.layered | dict(rope_parameters=_ropes(sizes)),
        sliding_window=sizes.window,
        layer_types=_alternating(sizes, _SLIDING),
        query_pre_attn_scalar=sizes.head_dim,
    )


def _gemma2(sizes: Sizes) -> PreTrainedConfig:
    """Scores and logits have soft caps."""
    return transformers.Gemma2Config(
        **sizes.layered,
        sliding_window=sizes.window,
        layer_types=_alternating(sizes, _SLIDING),
        query_pre_attn_scalar=sizes.head_dim,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=30.0,
    )


def _gemma4(sizes: Sizes) -> PreTrainedConfig:
    """Its last two layers have no K and V of their own, its full ones have wider heads."""
    return transformers.Gemma4TextConfig(
        **sizes.layered | dict(rope_parameters=_ropes(sizes)),
        sliding_window=sizes.window,
        layer_types=_alternating(sizes, _SLIDING),
        global_head_dim=2 * sizes.head_dim,
        num_global_key_value_heads=1,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=sizes.vocab_size,
    )


def _llama4(sizes: Sizes) -> PreTrainedConfig:
    """Chunked windows; angles on those layers alone."""
    types = _alternating(sizes, _CHUNKED)
    return transformers.Llama4TextConfig(
        **sizes.layered,
        **_local_experts(sizes),
        attention_chunk_size=sizes.window,
        layer_types=types,
        no_rope_layers=[int(kind == _CHUNKED) for kind in types],
        intermediate_size_mlp=2 * sizes.hidden_size,
        interleave_moe_layer_step=2,
        floor_scale=64,
    )


def _qwen3_moe(sizes: Sizes) -> PreTrainedConfig:
    return transformers.Qwen3MoeConfig(**sizes.layered, **_experts(sizes))


def _minimax_m2(sizes: Sizes) -> PreTrainedConfig:
    return transformers.MiniMaxM2Config(**sizes.layered, **_local_experts(sizes))


def _deepseek_v3(sizes: Sizes) -> PreTrainedConfig:
    common = sizes.common | dict(num_key_value_heads=sizes.num_heads, num_hidden_layers=sizes.num_layers)
    return transformers.DeepseekV3Config(
        **common,
        **_routed_experts(sizes),
        kv_lora_rank=sizes.hidden_size // 2,
        q_lora_rank=sizes.hidden_size // 2,
        qk_rope_head_dim=sizes.head_dim // 2,
        qk_nope_head_dim=sizes.head_dim,
        v_head_dim=sizes.head_dim,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )


def fill_family(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Draw every weight, in the order of its name, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    gains = _Gains(model)
    for name, parameter in sorted(model.named_parameters()):
        weight = parameter.detach()
        if "dt_bias" in name or "dt_proj.bias" in name:
            weight.fill_(_STEP_BIAS)
        elif "A_log" in name:
            decays = torch.linspace(_SMALLEST_DECAY, _LARGEST_DECAY, weight.numel())
            weight.copy_(decays.view(weight.shape))
        elif "sinks" in name:
            weight.normal_(0, 1, generator=generator)
        elif name.endswith("bias"):
            weight.normal_(0, _BIAS_GAIN, generator=generator)
        elif weight.dim() == 1:
            gains.set_norm(name, weight)
        else:
            spread = scale * gains.of_matrix(name) / math.sqrt(gains.fan_in(name, weight))
            weight.normal_(0, spread, generator=generator)
    model.get_output_embeddings().weight.detach()[model.config.eos_token_id] = 0


class _Gains:
    def __init__(self, model: PreTrainedModel) -> None:
        names = [name for name, _ in model.named_parameters()]
        self._last_layer = f".{max(_layer(name) for name in names)}."
        self._has_query_norm = any("q_norm" in name for name in names)
        # Gemma normalises what a branch adds, and scales embeddings by the root of the hidden size.
        self._is_gemma = any("post_feedforward_layernorm" in name for name in names)
        self._experts_by_input = (
            model.config.model_type == "gpt_oss"
        )  # [experts, in, out], others' are out, in

    def of_matrix(self, name: str) -> float:
        is_last = self._last_layer in name
        if "embed" in name:
            return _EMBEDDING_GAIN
        if "lm_head" in name:
            return _HEAD_GAIN
        if "router" in name or name.endswith(".gate.weight"):
            return _ROUTER_GAIN
        if "q_b_proj" in name or ("q_proj" in name and not self._has_query_norm):
            return _LAST_QUERY_GAIN if is_last else _QUERY_GAIN
        if "o_proj" in name or "out_proj" in name:
            return _LAST_OUTPUT_GAIN if is_last else _OUTPUT_GAIN
        if "down_proj" in name:
            return _LAST_MLP_GAIN if is_last else _MLP_GAIN
        return 1.0

    def fan_in(self, name: str, weight: Tensor) -> int:
        if "embed" in name:  # a token is looked up, not summed
            return weight.shape[1] if self._is_gemma else 1
        by_input = weight.dim() == 3 and self._experts_by_input
        return int(weight.shape[-2 if by_input else -1])

    def set_norm(self, name: str, weight: Tensor) -> None:
        """Others than these stay as they are made: all ones, or zeros where one is added to them."""
        is_last = self._last_layer in name
        if "q_norm" in name:
            gain = _LAST_QUERY_GAIN if is_last else _QUERY_GAIN
        elif self._is_gemma and "post_attention_layernorm" in name:
            gain = _LAST_OUTPUT_GAIN if is_last else _OUTPUT_GAIN
        elif self._is_gemma and "post_feedforward_layernorm" in name:
            gain = _LAST_MLP_GAIN if is_last else _MLP_GAIN
        else:
            return
        weight.fill_(gain if weight.mean() > 0.5 else gain - 1)


def _layer(name: str) -> int:
    """Return -1 for what is of no layer."""
    _, found, rest = name.partition("layers.")
    return int(rest.split(".")[0]) if found and rest.split(".")[0].isdigit() else -1


FAMILIES: dict[str, Family] = {
    "qwen3_5": Family(_qwen3_5, 4, fill_family),
    "qwen3_5_moe": Family(_qwen3_5_moe, 4, fill_family),
    "qwen3_next": Family(_qwen3_next, 4, fill_family),
    "nemotron_h": Family(_nemotron_h, 6, fill_family),
    "falcon_h1": Family(_falcon_h1, 2, fill_family),
    "bamba": Family(_bamba, 4, fill_family),
    "jamba": Family(_jamba, 4, fill_family),
    "gpt_oss": Family(_gpt_oss, 4, fill_family, has_window=True),
    "gemma2": Family(_gemma2, 4, fill_family, has_window=True),
    "gemma3": Family(_gemma3, 4, fill_family, has_window=True),
    "gemma4": Family(_gemma4, 6, fill_family, has_window=True),
    "llama4": Family(_llama4, 4, fill_family, has_window=True),
    "qwen3_moe": Family(_qwen3_moe, 2, fill_family),
    "minimax_m2": Family(_minimax_m2, 2, fill_family),
    "deepseek_v3": Family(_deepseek_v3, 2, fill_family),
}
