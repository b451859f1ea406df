"""Tiny random checkpoints, each made once per process, where pytest cleans up however the process ends."""

import os
from functools import cache
from pathlib import Path

from services.cli.make_model import make_model


@cache
def tiny_checkpoint(
    architecture: str = "llama", tokenizer: str = "characters", seed: int = 0, num_kv_heads: int = 2
) -> Path:
    folder = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"])  # set by conftest.py
    directory = folder / f"{architecture}-{tokenizer}-{seed}-{num_kv_heads}"
    make_model(directory, architecture, tokenizer=tokenizer, seed=seed, num_kv_heads=num_kv_heads)
    return directory
