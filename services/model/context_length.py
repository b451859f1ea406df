"""A checkpoint's config.json says how long prompt and answer together may be. This module is pure."""

from collections.abc import Mapping
from typing import Any


def context_tokens(config: Mapping[str, Any]) -> int:
    """Return the context in tokens.

    It is max_position_embeddings, but where rotary angles are stretched and it is the length before that:

    yarn     factor x original_max_position_embeddings, as the angles are made for. Qwen3 states 40,960, room
             for an answer included, beside an original length of 32,768.
    linear   factor x max_position_embeddings, but where an original length is stated beside it
    llama3   as it stands: it is the stretched length

    So vLLM reads it (_get_and_verify_max_len), and SGLang but for yarn. Without an original length
    transformers takes max_position_embeddings for it, and without a factor what makes that of the original
    length. A model with angles of its own for each kind of layer has the least of their lengths. Gemma 3's
    stated length is the stretched one.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not stated, or no number.
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
