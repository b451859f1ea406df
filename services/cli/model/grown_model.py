"""A target for a small checkpoint to draft for: that one's layers, and some behind them that add little.

So the small one foretells what the grown one chooses, the more often the less the new layers add. Both have
the same embeddings, head and tokenizer.
"""

import math
import shutil
from copy import deepcopy
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from services.values.errors import ConfigError

_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_WRITE_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def grow(source: Path, directory: Path, extra_layers: int, gain: float, seed: int) -> None:
    """Write the checkpoint in `source` with so many more layers: random ones, what they add times `gain`.

    Raises:
        ConfigError: `source` is none of those whose layers are all alike, or nothing can be written.
    """
    try:
        small = AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype=torch.float32)
        grown = _with_layers(small, extra_layers)
        _fill_new(grown, small.config.num_hidden_layers, gain, seed)
        shutil.copytree(source, directory, dirs_exist_ok=True)  # the tokenizer, too
        grown.save_pretrained(directory)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot grow {source} into {directory}: {error}") from error


def _with_layers(small: PreTrainedModel, extra_layers: int) -> PreTrainedModel:
    config: PreTrainedConfig = deepcopy(small.config)
    if config.model_type not in _FAMILIES:
        raise ValueError(f"only {', '.join(_FAMILIES)} grow, it is of {config.model_type}")
    config.num_hidden_layers += extra_layers
    if kinds := getattr(small.config, "layer_types", None):
        config.layer_types = [*kinds, *kinds[-1:] * extra_layers]
    with torch.random.fork_rng(devices=[]):
        grown: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    grown.load_state_dict(small.state_dict(), strict=False)
    return grown


def _fill_new(grown: PreTrainedModel, first: int, gain: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = tuple(f".layers.{layer}." for layer in range(first, grown.config.num_hidden_layers))
    for name, parameter in sorted(grown.named_parameters()):
        if parameter.dim() < 2 or not any(layer in name for layer in new):
            continue
        scale = gain if name.endswith(_WRITE_TO_RESIDUAL) else 1.0
        parameter.detach().normal_(0, scale / math.sqrt(parameter.shape[1]), generator=generator)
