"""This module reads the model, the length of its context and its type from a config.json. It is pure.

It also reports contradictions in a config.json, and computes how many conversations a pool holds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from services.values.errors import ConfigError

# transformers and SGLang read a config by its model_type. transformers also chooses the model by that, and
# SGLang by the architectures. These are known without either; transformers' own table is longer.
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
    """Return a contradiction of config.json, or None where none is known.

    `model_types` has the types of each architecture. Of several architectures one that agrees is enough.
    """
    known = [name for name in config.get("architectures") or () if name in model_types]
    model_type = config.get("model_type")
    if not known or any(model_type in model_types[name] for name in known):
        return None
    expected = " or ".join(map(repr, model_types[known[0]]))
    return f"architecture {known[0]} is of model_type {expected}, not {model_type!r}"


def context_tokens(config: Mapping[str, Any]) -> int:
    """Return the context in tokens.

    It is max_position_embeddings, unless rotary angles are stretched and that is the length before:

    - With yarn it is factor x original_max_position_embeddings, which the angles are made for. Qwen3 states
      40,960, which includes room for an answer, beside an original length of 32,768.
    - With linear it is factor x max_position_embeddings, unless an original length is stated beside it.
    - With llama3 it is max_position_embeddings, which is the stretched length.

    vLLM reads it so (_get_and_verify_max_len), and SGLang except with yarn. Without an original length
    transformers uses max_position_embeddings for it, and without a factor the ratio of the two. A model with
    angles of its own for each kind of layer has the least of their lengths. Gemma 3's stated length is the
    stretched one.

    Raises KeyError, TypeError, ValueError or AttributeError where it is not stated, or no number.
    """
    config = config.get("text_config", config)
    stated = int(config["max_position_embeddings"])
    if str(config.get("model_type")).startswith("gemma3"):
        return stated
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    per_kind = [part for part in rope.values() if isinstance(part, Mapping)]
    return min(_stretched(stated, part) for part in (per_kind or [rope]))


def _stretched(stated: int, rope: Mapping[str, Any]) -> int:
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    if factor is None:
        return stated
    if kind == "yarn":
        return int(float(factor) * int(original or stated))
    if kind == "linear" and original is None:
        return int(float(factor) * stated)
    return stated


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config.json, which may be all of it. Raises ConfigError."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ConfigError(f"config.json's text_config is no object: {text!r}")
    return text or config


def kv_dtype(config: Mapping[str, Any]) -> str:
    """Return the type of the weights, which is KV's, too, unless another is requested. Raises ConfigError."""
    parts = (config, text_part(config))
    name = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if not isinstance(name, str) or name not in ITEM_BYTES:
        raise ConfigError(f"config.json names dtype {name!r}; say --dtype={'|'.join(ITEM_BYTES)}")
    return name


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool has the KV of one rank.

    A conversation of `context_tokens` takes whole pages of `page_size` tokens.
    """

    token_bytes: int
    page_size: int
    context_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def conversation_pages(self) -> int:
        return -(-self.context_tokens // self.page_size)

    def pages_in(self, size_bytes: float) -> int:
        return int(size_bytes // self.page_bytes)

    def pages_for(self, conversations: int, ranks: int) -> int:
        return -(-conversations // ranks) * self.conversation_pages

    def conversations_in(self, pages: int) -> int:
        return pages // self.conversation_pages
