"""Pairs of a target and a draft, each made once per process: see services/cli/grown_model.py."""

import os
from functools import cache
from pathlib import Path

from exactness.checkpoints import tiny_checkpoint
from services.cli.grown_model import grow


@cache
def grown_checkpoint(architecture: str = "llama", gain: float = 0.5, window: int | None = None) -> Path:
    """For which tiny_checkpoint(architecture) drafts."""
    directory = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"]) / f"grown-{architecture}-{gain}-{window}"
    grow(tiny_checkpoint(architecture, window=window), directory, 2, gain, 1)
    return directory
