"""Whether the architecture that a config.json names, and its model_type, are of one model. Pure."""

from collections.abc import Mapping
from typing import Any

# transformers and SGLang read a config by its model_type; transformers makes the model by that too, SGLang
# by its architectures.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}


def disagreement(config: Mapping[str, Any]) -> str | None:
    """What of config.json contradicts itself, for a sentence; None: nothing that we know of.

    Of several architectures one that agrees is enough.
    """
    known = [name for name in config.get("architectures") or () if name in MODEL_TYPES]
    model_type = config.get("model_type")
    if not known or model_type in {MODEL_TYPES[name] for name in known}:
        return None
    return f"architecture {known[0]} is of model_type {MODEL_TYPES[known[0]]!r}, not {model_type!r}"
