"""A random Llama is made on the device itself, which takes a second where a CPU takes a minute.

    python -m bench.gpu.model DIR --device=cuda [--layers ...]     writes a checkpoint, in half precision

Several runners of one process need no checkpoint: `runner_on` gives each a copy of the same model.
"""

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bench.checkpoint import Size
from bench.device import CPU, device_named
from services.cli.model.make_model import make_model
from services.engine.torch import runner as runner_module
from services.engine.torch.attention.paged_attention import IMPLEMENTATION
from services.engine.torch.checkpoint import Checkpoint
from services.engine.torch.runner import TorchRunner

BILLION = Size(layers=18, hidden=2560, heads=20, kv_heads=10, max_context_tokens=16_384)
HUNDRED_MILLION = Size(layers=12, hidden=960, heads=15, kv_heads=5, max_context_tokens=16_384)
TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2, max_context_tokens=16_384)
_HEAD_GAIN = 3.0


def size_on(device: torch.device) -> Size:
    return TINY if device.type == "cpu" else BILLION


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def random_model(size: Size, device: torch.device, seed: int = 1) -> PreTrainedModel:
    """Make the model that `make-model` would, but for the weights' values; it attends by sdpa."""
    with TemporaryDirectory() as directory:
        make_model(Path(directory))
        config = AutoConfig.from_pretrained(directory)
    return _filled(_sized(config, size, dtype_on(device)), device, seed)


def _sized(config: PreTrainedConfig, size: Size, dtype: torch.dtype) -> PreTrainedConfig:
    config.hidden_size, config.intermediate_size = size.hidden, 2 * size.hidden
    config.num_hidden_layers = size.layers
    config.num_attention_heads, config.num_key_value_heads = size.heads, size.kv_heads
    config.head_dim = size.hidden // size.heads
    config.max_position_embeddings = size.max_context_tokens
    config.dtype = dtype
    return config


def _filled(config: PreTrainedConfig, device: torch.device, seed: int) -> PreTrainedModel:
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, attn_implementation="sdpa"
        )
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        gain = _HEAD_GAIN if "lm_head" in name else 1.0
        fan_in = 1 if "embed" in name else weight.shape[1]
        weight.normal_(0, gain / fan_in**0.5, generator=generator)
    return model.eval()


def runner_on(model: PreTrainedModel, *, num_pages: int, page_size: int, **options: Any) -> TorchRunner:
    """Open a runner on a copy of `model`."""
    with _loading(model):
        return TorchRunner(
            "bench",
            device=str(model.device),
            num_pages=num_pages,
            page_size=page_size,
            self_check=False,
            **options,
        )


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that attends as the engine does."""
    own = copy.deepcopy(model)
    own.set_attn_implementation(IMPLEMENTATION)
    return own.eval()


def opened(model: PreTrainedModel) -> Checkpoint:
    return Checkpoint(Path("bench"), model.config, model.dtype, 0)


@contextmanager
def _loading(model: PreTrainedModel) -> Iterator[None]:
    with (
        mock.patch.object(runner_module, "open_checkpoint", lambda *_, **__: opened(model)),
        mock.patch.object(runner_module, "load_model", lambda *_, **__: copied(model)),
    ):
        yield


def write(directory: Path, size: Size, device: torch.device) -> None:
    """Write a random model with its tokenizer."""
    make_model(directory)
    random_model(size, device).to(torch.bfloat16).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", type=device_named, default=CPU)
    for name, default in asdict(BILLION).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = vars(parser.parse_args())
    directory, device = arguments.pop("directory"), arguments.pop("device")
    write(directory, Size(**arguments), device)


if __name__ == "__main__":
    main()
