"""This module tells what a LoRA adapter adds to which linear layers, from PEFT's adapter_config.json and the
shapes of its tensors. It is pure.

A layer's output W x becomes W x + scale * B (A x), with A [rank, inputs] and B [outputs, rank].
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from services.values.errors import ConfigError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MOST = 1e6  # No rank or alpha is more.

_PREFIX = "base_model.model."
_PART = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
# These tell how the adapter was trained, or from what, and not what it computes. The layers are those that
# have tensors.
_IRRELEVANT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_type"),
        *("peft_version", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "megatron_core", "megatron_config", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "runtime_config", "qalora_group_size", "ensure_weight_tying", "bias"),
    }
)
# Others change the weights of the model itself when they begin.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraLayer:
    rank: int
    num_inputs: int
    num_outputs: int
    scale: float

    @property
    def parameters(self) -> int:
        return self.rank * (self.num_inputs + self.num_outputs)


def config_of(content: bytes) -> dict[str, Any]:
    """Return what the file CONFIG has. Raises ConfigError."""
    try:
        config = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{CONFIG} is not a JSON object")
    return config


def digest_of(layers: Mapping[str, LoraLayer], content: bytes) -> str:
    """Return what differs between two adapters that compute differently: `content` has their weights."""
    scales = json.dumps([(name, layers[name].scale) for name in sorted(layers)])
    return blake2b(content, key=blake2b(scales.encode()).digest(), digest_size=16).hexdigest()


def lora_layers(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LoraLayer]:
    """Return by name the model's linear layers that the adapter changes.

    Raises ConfigError, which names what is damaged, or what is not served.
    """
    _require_plain(config)
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _PART.fullmatch(name)
        if match is None:
            raise ConfigError(f"its tensor {name} is not of a linear layer's A or B, which alone are served")
        if len(shape) != 2:
            raise ConfigError(f"its tensor {name} has the shape {shape}, not two dimensions")
        of_layer = parts.setdefault(match["layer"].removeprefix(_PREFIX), {})
        if match["part"] in of_layer:
            raise ConfigError(f"its tensor {name} is there twice, with and without {_PREFIX}")
        of_layer[match["part"]] = shape
    if not parts:
        raise ConfigError("it has no tensors")
    return {layer: _layer(config, layer, parts[layer]) for layer in sorted(parts)}


def _require_plain(config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"its peft_type is {kind!r}; only LORA is served")
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise ConfigError(f"its task_type is {task!r}; only CAUSAL_LM is served")
    if (bias := config.get("bias", "none")) != "none":
        raise ConfigError(f"bias={bias!r} is not served: it changes biases of the model")
    if (begins := config.get("init_lora_weights")) not in _PLAIN_BEGINNINGS:
        raise ConfigError(f"init_lora_weights={begins!r} is not served: it changes weights of the model")
    for name, value in sorted(config.items()):
        if value and name not in _READ and name not in _IRRELEVANT:
            raise ConfigError(f"{name}={value!r} is not served")


def _layer(config: Mapping[str, Any], layer: str, shapes: Mapping[str, tuple[int, ...]]) -> LoraLayer:
    if len(shapes) != 2:
        raise ConfigError(f"its layer {layer} has no lora_{'B' if 'A' in shapes else 'A'}")
    (rank, num_inputs), (num_outputs, of_b) = shapes["A"], shapes["B"]
    told = _told(config, "rank_pattern", "r", layer)
    if not rank == of_b == told:
        raise ConfigError(f"its layer {layer} has A of rank {rank} and B of {of_b}; its config tells {told}")
    alpha = _told(config, "alpha_pattern", "lora_alpha", layer)
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return LoraLayer(rank, num_inputs, num_outputs, alpha / divisor)


def _told(config: Mapping[str, Any], patterns: str, name: str, layer: str) -> float:
    """Return the number of the first pattern that the layer's name ends with, else that of all layers."""
    value, own_values = config.get(name), config.get(patterns) or {}
    if not isinstance(own_values, Mapping):
        raise ConfigError(f"its {patterns} must be an object, got {own_values!r:.40}")
    for pattern, own in own_values.items():
        try:
            is_own = re.match(rf"(.*\.)?({pattern})$", layer) is not None
        except re.error as error:
            raise ConfigError(f"{patterns} has {pattern!r}, which is not a pattern: {error}") from error
        if is_own:
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
        raise ConfigError(f"its {name} must be a number above 0, at most {_MOST:g}, got {value!r:.40}")
    return value
