"""LoRA adapters in PEFT's format, and checkpoints with one merged into the weights, as the reference."""

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exactness.reference import reference_model
from services.model.lora import CONFIG, WEIGHTS, lora_layers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@cache
def adapter_of(
    checkpoint: Path,
    name: str,
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 1,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """`strength` is how much of a layer's output it adds, about."""
    root = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"])
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"lora-{checkpoint.name}-{name}-", dir=root))
    told: dict[str, Any] = dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, bias="none"
    )
    told |= dict(target_modules=list(targets), lora_dropout=0.1, inference_mode=True, use_dora=False)
    (directory / CONFIG).write_text(json.dumps(told | config))
    chance, tensors = torch.Generator().manual_seed(seed), {}
    for layer, weight in linears_of(checkpoint).items():
        if layer.rsplit(".", 1)[-1] in targets:
            outputs, inputs = weight.shape
            scale = strength * weight.std() / 2 / rank**0.5
            key = f"base_model.model.{layer}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=chance)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=chance) * scale
    save_file(tensors, directory / WEIGHTS)
    return directory


def linears_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    modules = reference_model(checkpoint).named_modules()
    return {name: each.weight.detach() for name, each in modules if type(each) is torch.nn.Linear}


@cache
def merged(checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with W + scale * B A for each W that the adapter changes."""
    directory = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"]) / f"{checkpoint.name}-with-{adapter.name}"
    shutil.copytree(checkpoint, directory)
    tensors = load_file(adapter / WEIGHTS)
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    layers = lora_layers(json.loads((adapter / CONFIG).read_text()), shapes)
    weights = load_file(checkpoint / "model.safetensors")
    for name, layer in layers.items():
        a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        key = f"{name}.weight"
        weights[key] = (weights[key].double() + layer.scale * b @ a).to(weights[key].dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
