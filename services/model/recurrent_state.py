"""A checkpoint's config.json says how large the state of a recurrent layer is. This module is pure.

    mixer              convolution                                  recurrent
    gated delta net    (2 key heads x d_k + value heads x d_v) x K  value heads x d_k x d_v
    Kimi's             3 heads x d x K                              heads x d x d
    Mamba-2            (heads x d + 2 groups x d_state) x K         heads x d x d_state
    short convolution  hidden x K                                   none

The convolution has K columns, as transformers keeps them (SGLang keeps K - 1). It has the model's type, the
recurrent part float32 whatever the model's is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATE_ITEM_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class LayerState:
    convolution: int
    recurrent: int
    parameters: int = 0  # of the mixer: projections in and out, and the convolution

    def size_bytes(self, item_bytes: int) -> int:
        return self.convolution * item_bytes + self.recurrent * STATE_ITEM_BYTES


def layer_state(config: Mapping[str, Any]) -> LayerState:
    """Return the state's size by the text part of a config.json.

    Raises KeyError, TypeError, ValueError where it says too little.
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
    # Queries, keys and values go in, with a gate and two numbers a head; values come out.
    projections = int(config["hidden_size"]) * (channels + 2 * values + 2 * value_heads)
    return LayerState(channels * columns, values * key_dim, projections + channels * columns)


def _kimi(config: Mapping[str, Any]) -> LayerState:
    said = config.get("linear_attn_config") or {}
    heads = int(said.get("num_heads") or config["linear_num_heads"])
    head_dim = int(said.get("head_dim") or config["linear_head_dim"])
    columns = int(said.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim") or 4)
    return LayerState(3 * heads * head_dim * columns, heads * head_dim * head_dim)


def _mamba2(config: Mapping[str, Any], heads: int) -> LayerState:
    head_dim = _first(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand") or 2) * int(config["hidden_size"])
    width = int(inner) if head_dim in (None, "auto") else heads * int(head_dim)
    state = int(_required(config, "ssm_state_size", "mamba_d_state"))
    groups = int(_first(config, "n_groups", "mamba_n_groups", "mamba_ngroups") or 1)
    columns = int(_first(config, "conv_kernel", "mamba_d_conv") or 4)
    channels = width + 2 * groups * state
    # What is convolved goes in, with a gate and a step a head; what comes out is as wide as the gate.
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
