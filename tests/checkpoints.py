"""Tiny random checkpoints, each made once per process and removed at its end."""

import tempfile
from functools import cache
from pathlib import Path

from services.cli.make_model import make_model

_ROOT = tempfile.TemporaryDirectory(prefix="isthmus-checkpoints-")


@cache
def tiny_checkpoint(
    architecture: str = "llama", tokenizer: str = "characters", seed: int = 0, num_kv_heads: int = 2
) -> Path:
    directory = Path(_ROOT.name) / f"{architecture}-{tokenizer}-{seed}-{num_kv_heads}"
    make_model(directory, architecture, tokenizer=tokenizer, seed=seed, num_kv_heads=num_kv_heads)
    return directory
