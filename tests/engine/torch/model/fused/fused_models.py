"""Tiny models of every family are fused, here or on a GPU."""

import torch

from exactness.checkpoints import tiny_checkpoint
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.model.model_probe import attending_by

# Products, norms, rotations and activations of a checkpoint of a few layers.
COUNTS = {
    "llama": (4, 5, 2, 2),
    "mistral": (4, 5, 2, 2),
    "qwen2": (4, 5, 2, 2),
    "qwen3": (4, 9, 2, 2),
    "qwen3_5": (8, 13, 2, 4),
    "qwen3_5_moe": (8, 13, 2, 4),
    "qwen3_next": (8, 13, 2, 4),
    "nemotron_h": (2, 7, 0, 0),
    "falcon_h1": (4, 5, 2, 0),
    "bamba": (6, 9, 2, 4),
    "jamba": (4, 15, 0, 2),
    "gpt_oss": (4, 9, 4, 0),
    "gemma2": (8, 17, 4, 4),
    "gemma3": (8, 25, 4, 4),
    "gemma4": (10, 46, 6, 6),
    "llama4": (8, 11, 0, 0),
    "qwen3_moe": (2, 9, 2, 0),
    "minimax_m2": (2, 9, 2, 0),
    "deepseek_v3": (4, 9, 2, 2),
}
OFF_BY = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


def loaded(family, dtype="float32", device="cpu"):
    return load_model(open_checkpoint(tiny_checkpoint(family), dtype), torch.device(device))


def logits_of(model):
    ids, positions = torch.arange(3, 12)[None].to(model.device), torch.arange(9)[None].to(model.device)
    with torch.inference_mode(), attending_by(model, "eager"):
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()


def off_by(given, expected):
    """Return the median of what tokens are off by: one of them may meet a tie, and other experts."""
    return ((given - expected).square().mean(-1) / expected.square().mean(-1)).sqrt().median().item()


def counts_of(fused):
    return fused.num_products, fused.num_norms, fused.num_rotations, fused.num_activations
