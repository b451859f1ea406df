"""A checkpoint's config.json says what each layer remembers of a sequence. This module is pure.

Names are transformers' 5.24 and those that published checkpoints had before; where a config.json leaves a
pattern to its model's class, that class's pattern is here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.values.kv import GroupKind

LayerKinds = tuple[GroupKind, ...]  # of one layer: none (experts alone), one, or two (Falcon-H1)

_FULL = (GroupKind.FULL_ATTENTION,)
_SLIDING = (GroupKind.SLIDING_WINDOW,)
_CHUNKED = (GroupKind.CHUNKED_WINDOW,)
_RECURRENT = (GroupKind.RECURRENT,)
_BOTH = (GroupKind.FULL_ATTENTION, GroupKind.RECURRENT)

_LISTS = ("layer_types", "layers_block_type", "block_types", "mixer_types", "attn_type_list")
_WORDS: dict[Any, LayerKinds] = {
    **dict.fromkeys(("full_attention", "attention", "attn", "indexed_attention"), _FULL),
    **dict.fromkeys(("deepseek_sparse_attention", "global_attention", 1), _FULL),
    **dict.fromkeys(("sliding_attention", "local_attention"), _SLIDING),
    "chunked_attention": _CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", 0), _RECURRENT),
    **dict.fromkeys(("hybrid", "hybrid_mamba"), _BOTH),
    **dict.fromkeys(("moe", "mlp"), ()),
}
_LETTERS: dict[str, LayerKinds] = {
    **{"M": _RECURRENT, "*": _FULL, "E": (), "-": ()},  # Nemotron-H's hybrid_override_pattern
    **{"L": _SLIDING, "G": _FULL},  # EXAONE's sliding_window_pattern
}
# These models leave their pattern to their class: each n-th layer sees all.
_INTERVALS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "exaone4": 4, "gemma3_text": 6}
_INTERVALS |= {"gemma4_text": 6}
_LINEAR_KEYS = ("linear_num_value_heads", "full_attention_interval")
_LINEAR_INTERVAL = 4  # this is Qwen3-Next's and Qwen3.5's


def layer_kinds(config: Mapping[str, Any]) -> list[LayerKinds]:
    """Return the kinds of each layer, by the text part of a config.json.

    Raises KeyError, TypeError, ValueError where it says too little, or what is not known here.
    """
    for name in _LISTS:
        if config.get(name):
            return [_of_word(name, word) for word in config[name]]
    if pattern := config.get("hybrid_override_pattern"):
        return [_LETTERS[letter] for letter in pattern]
    num_layers = int(config["num_hidden_layers"])
    if (recurrent := _recurrent_pattern(config, num_layers)) is not None:
        return recurrent
    return _windowed_pattern(config, num_layers)


def _of_word(name: str, word: Any) -> LayerKinds:
    if word not in _WORDS:
        raise ValueError(f"{name}: {word!r} is no kind of layer that is known here")
    return _WORDS[word]


def _recurrent_pattern(config: Mapping[str, Any], num_layers: int) -> list[LayerKinds] | None:
    if config.get("model_type") == "falcon_h1":
        return [_BOTH] * num_layers
    if any(config.get(name) for name in _LINEAR_KEYS):
        return _each(int(config.get("full_attention_interval") or _LINEAR_INTERVAL), num_layers, _RECURRENT)
    if (full := _full_layers(config, num_layers)) is not None:
        return [_FULL if layer in full else _RECURRENT for layer in range(num_layers)]
    return None


def _full_layers(config: Mapping[str, Any], num_layers: int) -> Sequence[int] | None:
    """Return the layers with attention, as Bamba, LFM2, Kimi (which counts from 1) and Jamba say them."""
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(name) is not None:
            return [int(layer) for layer in config[name]]
    if linear := config.get("linear_attn_config"):
        return [int(layer) - 1 for layer in linear["full_attn_layers"]]
    if period := config.get("attn_layer_period"):
        return range(int(config["attn_layer_offset"]), num_layers, int(period))
    return None


def _windowed_pattern(config: Mapping[str, Any], num_layers: int) -> list[LayerKinds]:
    if config.get("attention_chunk_size"):
        return _chunked_pattern(config, num_layers)
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [_FULL] * num_layers
    pattern = config.get("sliding_window_pattern") or _INTERVALS.get(str(config.get("model_type")))
    if isinstance(pattern, str):
        return [_LETTERS[pattern[layer % len(pattern)]] for layer in range(num_layers)]
    if pattern:
        return _each(int(pattern), num_layers, _SLIDING)
    first = int(config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]


def _chunked_pattern(config: Mapping[str, Any], num_layers: int) -> list[LayerKinds]:
    """Llama 4's layers without rotation see all, the others a chunk."""
    if rotated := config.get("no_rope_layers"):  # in spite of its name, 1 means with rotation
        return [_CHUNKED if has_rope else _FULL for has_rope in rotated]
    return _each(int(config.get("no_rope_layer_interval") or 4), num_layers, _CHUNKED)


def _each(interval: int, num_layers: int, others: LayerKinds) -> list[LayerKinds]:
    return [others if layer % interval else _FULL for layer in range(1, num_layers + 1)]
