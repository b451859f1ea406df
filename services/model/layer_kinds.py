"""This module reads from config.json what each layer stores for a sequence, and how much. It is pure.

Names are those of transformers 5.24 and of earlier checkpoints; where a config.json leaves a pattern to its
model's class, that class's pattern is here. The state of a recurrent layer has this size:

    mixer              convolution                                  recurrent
    gated delta net    (2 key heads x d_k + value heads x d_v) x K  value heads x d_k x d_v
    Kimi's             3 heads x d x K                              heads x d x d
    Mamba-2            (heads x d + 2 groups x d_state) x K         heads x d x d_state
    short convolution  hidden x K                                   none

The convolution has K columns, as in transformers (SGLang has K - 1). It has the model's type, and the
recurrent part is always float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.values.kv import GroupKind

LayerKinds = tuple[GroupKind, ...]  # These are one layer's: none (experts alone), one, or two (Falcon-H1).

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
    **{"M": _RECURRENT, "*": _FULL, "E": (), "-": ()},  # These are of Nemotron-H's hybrid_override_pattern.
    **{"L": _SLIDING, "G": _FULL},  # These are of EXAONE's sliding_window_pattern.
}
# These models leave their pattern to their class: each n-th layer sees all.
_INTERVALS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "exaone4": 4, "gemma3_text": 6}
_INTERVALS |= {"gemma4_text": 6}
_LINEAR_KEYS = ("linear_num_value_heads", "full_attention_interval")
_LINEAR_INTERVAL = 4  # This is Qwen3-Next's and Qwen3.5's.


def layer_kinds(config: Mapping[str, Any]) -> list[LayerKinds]:
    """Return the kinds of each layer, by the text part of a config.json.

    Raises KeyError, TypeError, ValueError where it is incomplete, or has an unknown kind.
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
    """Return the layers with attention, as Bamba, LFM2, Kimi (which counts from 1) and Jamba state them."""
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
    if rotated := config.get("no_rope_layers"):  # In spite of its name, 1 means with rotation.
        return [_CHUNKED if has_rope else _FULL for has_rope in rotated]
    return _each(int(config.get("no_rope_layer_interval") or 4), num_layers, _CHUNKED)


def _each(interval: int, num_layers: int, others: LayerKinds) -> list[LayerKinds]:
    return [others if layer % interval else _FULL for layer in range(1, num_layers + 1)]


STATE_ITEM_BYTES = 4  # This is float32.


@dataclass(frozen=True, slots=True)
class LayerState:
    convolution: int
    recurrent: int
    parameters: int = 0  # These are the mixer's: projections in and out, and the convolution.

    def size_bytes(self, item_bytes: int) -> int:
        return self.convolution * item_bytes + self.recurrent * STATE_ITEM_BYTES


def layer_state(config: Mapping[str, Any]) -> LayerState:
    """Return the state's size by the text part of a config.json.

    Raises KeyError, TypeError, ValueError where it is incomplete.
    """
    if config.get("linear_num_value_heads"):
        return _delta_net(config)
    if config.get("linear_num_heads") or config.get("linear_attn_config"):
        return _kimi(config)
    if heads := _first(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):
        return _mamba2(config, int(heads))
    if columns := config.get("conv_L_cache"):
        hidden = int(config["hidden_size"])
        return LayerState(hidden * int(columns), 0, 4 * hidden * hidden + hidden * int(columns))
    raise ValueError("it does not tell the size of a recurrent layer's state")


def _delta_net(config: Mapping[str, Any]) -> LayerState:
    value_heads, key_dim, value_dim = (
        int(config[f"linear_{name}"]) for name in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    channels = 2 * int(config["linear_num_key_heads"]) * key_dim + value_heads * value_dim
    columns = int(config.get("linear_conv_kernel_dim") or 4)
    values = value_heads * value_dim
    # The inputs are queries, keys and values, with a gate and two numbers per head; the outputs are values.
    projections = int(config["hidden_size"]) * (channels + 2 * values + 2 * value_heads)
    return LayerState(channels * columns, values * key_dim, projections + channels * columns)


def _kimi(config: Mapping[str, Any]) -> LayerState:
    linear = config.get("linear_attn_config") or {}
    heads = int(linear.get("num_heads") or config["linear_num_heads"])
    head_dim = int(linear.get("head_dim") or config["linear_head_dim"])
    columns = int(linear.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim") or 4)
    return LayerState(3 * heads * head_dim * columns, heads * head_dim * head_dim)


def _mamba2(config: Mapping[str, Any], heads: int) -> LayerState:
    head_dim = _first(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand") or 2) * int(config["hidden_size"])
    width = int(inner) if head_dim in (None, "auto") else heads * int(head_dim)
    state = int(_required(config, "ssm_state_size", "mamba_d_state"))
    groups = int(_first(config, "n_groups", "mamba_n_groups", "mamba_ngroups") or 1)
    columns = int(_first(config, "conv_kernel", "mamba_d_conv") or 4)
    channels = width + 2 * groups * state
    # The inputs are those of the convolution, with a gate and a step per head; the output is as wide as the
    # gate.
    projections = int(config["hidden_size"]) * (channels + 2 * width + heads)
    return LayerState(channels * columns, width * state, projections + channels * columns)


def recurrent_parameters(config: Mapping[str, Any]) -> int:
    """Return the parameters of one layer's mixer, as layer_state.

    Raises ValueError where its projections are not known here.
    """
    if not (parameters := layer_state(config).parameters):
        raise ValueError("the projections of its recurrent layers are not known here")
    return parameters


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _required(config: Mapping[str, Any], *names: str) -> Any:
    if (value := _first(config, *names)) is None:
        raise KeyError(names[0])
    return value
