"""Pairs of a target and a draft, each made once per process: see grow in services/cli/model/make_model.py."""

import os
import shutil
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from exactness.checkpoints import tiny_checkpoint
from services.cli.model.make_model import grow
from services.engine.torch.checkpoint import LOADING


@cache
def grown_checkpoint(architecture: str = "llama", gain: float = 0.5, window: int | None = None) -> Path:
    """For which tiny_checkpoint(architecture) drafts."""
    directory = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"]) / f"grown-{architecture}-{gain}-{window}"
    grow(tiny_checkpoint(architecture, window=window), directory, 2, gain, 1)
    return directory


@cache
def faint_checkpoint(family: str, gain: float = 400.0) -> Path:
    """tiny_checkpoint(family), but what its layers add is little beside its embeddings: about half of its
    choices are those of last_token_draft(family), whatever the layers are."""
    model = _load(tiny_checkpoint(family))
    model.get_input_embeddings().weight.detach().mul_(gain)
    return _save(model, tiny_checkpoint(family), f"faint-{family}-{gain}")


@cache
def last_token_draft(family: str) -> Path:
    """A Llama with the embeddings and the head of tiny_checkpoint(family), whose layers add nothing."""
    model, draft = _load(tiny_checkpoint(family)), _load(tiny_checkpoint())
    draft.get_input_embeddings().weight.detach().copy_(model.get_input_embeddings().weight)
    draft.get_output_embeddings().weight.detach().copy_(model.get_output_embeddings().weight)
    for name, weight in draft.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.detach().zero_()
    return _save(draft, tiny_checkpoint(), f"last-token-{family}")


def _load(directory: Path) -> PreTrainedModel:
    with LOADING:  # a rank of this process may be starting
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)


def _save(model: PreTrainedModel, source: Path, name: str) -> Path:
    """With the tokenizer of `source`."""
    directory = Path(os.environ["ISTHMUS_TEST_CHECKPOINTS"]) / name
    shutil.copytree(source, directory)
    model.save_pretrained(directory)
    return directory
