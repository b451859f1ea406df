"""Pairs of a target and a draft, each made once: see grow in services/cli/model/make_model.py."""

import shutil
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from exactness.checkpoints import made_once, tiny_checkpoint
from services.cli.model.make_model import grow
from services.engine.torch.checkpoint import LOADING


@cache
def grown_checkpoint(architecture: str = "llama", gain: float = 0.5, window: int | None = None) -> Path:
    """For which tiny_checkpoint(architecture) drafts."""
    draft = tiny_checkpoint(architecture, window=window)
    return made_once(
        f"grown-{architecture}-{gain}-{window}", lambda directory: grow(draft, directory, 2, gain, 1)
    )


@cache
def faint_checkpoint(family: str, gain: float = 400.0) -> Path:
    """tiny_checkpoint(family), but what its layers add is little beside its embeddings: about half of its
    choices are those of last_token_draft(family), whatever the layers are."""
    source = tiny_checkpoint(family)

    def make(directory: Path) -> None:
        model = _load(source)
        model.get_input_embeddings().weight.detach().mul_(gain)
        _save(model, source, directory)

    return made_once(f"faint-{family}-{gain}", make)


@cache
def last_token_draft(family: str) -> Path:
    """A Llama with the embeddings and the head of tiny_checkpoint(family), whose layers add nothing."""
    target, source = tiny_checkpoint(family), tiny_checkpoint()

    def make(directory: Path) -> None:
        model, draft = _load(target), _load(source)
        draft.get_input_embeddings().weight.detach().copy_(model.get_input_embeddings().weight)
        draft.get_output_embeddings().weight.detach().copy_(model.get_output_embeddings().weight)
        for name, weight in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.detach().zero_()
        _save(draft, source, directory)

    return made_once(f"last-token-{family}", make)


def _load(directory: Path) -> PreTrainedModel:
    with LOADING:  # a rank of this process may be starting
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32)


def _save(model: PreTrainedModel, source: Path, directory: Path) -> None:
    """With the tokenizer of `source`."""
    shutil.copytree(source, directory)
    model.save_pretrained(directory)
