"""Tiny random checkpoints, each made once per process and removed at its end."""

import tempfile
from functools import cache
from pathlib import Path

from services.cli.make_model import make_model

_ROOT = tempfile.TemporaryDirectory(prefix="isthmus-checkpoints-")


@cache
def tiny_checkpoint(architecture: str = "llama", tokenizer: str = "characters", seed: int = 0) -> Path:
    directory = Path(_ROOT.name) / f"{architecture}-{tokenizer}-{seed}"
    make_model(directory, architecture, tokenizer=tokenizer, seed=seed)
    return directory
