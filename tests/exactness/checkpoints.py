"""Tiny random checkpoints, each made once for all processes of a run. Pytest cleans up however that ends."""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.families import FAMILIES
from services.cli.model import make_model as make_models
from services.cli.model.make_model import make_model


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder of that name, which `make` writes unless another process has."""
    folder = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"])  # set by conftest.py
    if not (directory := folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            make(Path(own) / name)
            try:
                (Path(own) / name).rename(directory)
            except OSError:
                if not directory.exists():  # Else another process was faster.
                    raise
    return directory


@cache
def tiny_checkpoint(
    architecture: str = "llama",
    tokenizer: str = "characters",
    seed: int = 0,
    num_kv_heads: int = 2,
    window: int | None = None,
) -> Path:
    family = FAMILIES.get(architecture, architecture)
    settings = {"tokenizer": tokenizer, "seed": seed, "num_kv_heads": num_kv_heads, "window": window}
    return made_once(
        "-".join(map(str, (architecture, *settings.values()))),
        lambda directory: make_model(directory, family, **settings),
    )


def _rope(kind: str, **settings: float) -> dict[str, dict[str, float | str]]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **settings}}


_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = dict(factor=4.0, original_max_position_embeddings=128)
# By name the architecture, and what of its config is unlike tiny_checkpoint's; each keeps 512 tokens.
SHAPES = {
    "llama3-rope": ("llama", _rope("llama3", **_LLAMA3)),
    "yarn": ("llama", _rope("yarn", **_YARN)),
    "yarn-attention-factor": (
        "llama",
        _rope("yarn", attention_factor=1.3, beta_fast=16.0, beta_slow=2.0, **_YARN),
    ),
    "yarn-mscale": ("qwen2", _rope("yarn", mscale=0.7, mscale_all_dim=1.0, **_YARN)),
    "yarn-qwen3": ("qwen3", _rope("yarn", **_YARN)),
    "yarn-not-truncated": ("mistral", _rope("yarn", truncate=False, **_YARN)),
    "linear": ("llama", {"max_position_embeddings": 128, **_rope("linear", factor=4.0)}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied-qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True}),
    "biased-mlp": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biased-qwen3": ("qwen3", {"attention_bias": True}),
    "head-dim-32": ("llama", {"head_dim": 32}),
    "head-dim-8": ("mistral", {"head_dim": 8}),
    "head-dim-6": ("llama", {"head_dim": 6}),
    "head-dim-128": ("qwen3", {"head_dim": 128}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "no-groups": ("mistral", {"num_key_value_heads": 4}),
    "groups-of-3": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "groups-of-7": ("llama", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "groups-of-20": (
        "llama",
        {"hidden_size": 80, "num_attention_heads": 20, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "vocabulary-517": ("qwen2", {"vocab_size": 517}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "three-layers": ("qwen2", {"num_hidden_layers": 3}),
    "odd-sizes": (
        "llama",
        {
            **{"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20},
            "intermediate_size": 101,
        },
    ),
}
_PLAIN = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    eos_token_id=make_models.EOS_ID,
    bos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
    sliding_window=None,
    dtype=torch.float32,
)


@cache
def shaped_checkpoint(name: str) -> Path:
    """One of SHAPES, with make_model's weights: every token of a prompt counts."""
    return made_once(f"shape-{name}", lambda directory: _make_shaped(directory, *SHAPES[name]))


def _make_shaped(directory: Path, architecture: str, changes: dict[str, Any]) -> None:
    config_class, model_class = make_models._MODELS[architecture]
    config = config_class(**{**_PLAIN, **changes}, initializer_range=make_models._GAIN_AT)
    with torch.random.fork_rng(devices=[]):
        model = model_class(config)
    make_models._fill(model, 0, 1.0)
    if config.tie_word_embeddings:
        _fill_tied(model)
    model.save_pretrained(directory)
    make_models._make_tokenizer("characters", 512, "plain").save_pretrained(directory)


def _fill_tied(model: PreTrainedModel) -> None:
    """Rows that are looked up and multiplied by: smaller than an embedding's, larger than a head's."""
    weight = model.get_input_embeddings().weight.detach()
    weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    weight[make_models.EOS_ID] = 0
