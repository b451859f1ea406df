"""A config.json says which model it is of, and may disagree with itself. This module is pure."""

from collections.abc import Collection, Mapping
from typing import Any

# transformers and SGLang read a config by its model_type; transformers makes the model by that, too, SGLang
# by its architectures. These are told apart without either; transformers' own table is longer.
MODEL_TYPES: Mapping[str, Collection[str]] = {
    "LlamaForCausalLM": ("llama",),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "MistralForCausalLM": ("mistral",),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
    "Qwen3NextForCausalLM": ("qwen3_next",),
    "Qwen3_5ForCausalLM": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "GptOssForCausalLM": ("gpt_oss",),
    "Gemma3ForCausalLM": ("gemma3_text",),
    "NemotronHForCausalLM": ("nemotron_h",),
    "FalconH1ForCausalLM": ("falcon_h1",),
    "MiniMaxM2ForCausalLM": ("minimax_m2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3",),
}


def disagreement(
    config: Mapping[str, Any], model_types: Mapping[str, Collection[str]] = MODEL_TYPES
) -> str | None:
    """Say what of config.json contradicts itself, or None where nothing does that we know of.

    `model_types` are those of each architecture. Of several architectures one that agrees is enough.
    """
    known = [name for name in config.get("architectures") or () if name in model_types]
    model_type = config.get("model_type")
    if not known or any(model_type in model_types[name] for name in known):
        return None
    expected = " or ".join(map(repr, model_types[known[0]]))
    return f"architecture {known[0]} is of model_type {expected}, not {model_type!r}"
