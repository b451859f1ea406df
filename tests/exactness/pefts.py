"""Adapters that PEFT itself has saved, and how far answers are from what PEFT itself computes with them.

PEFT is only in the environments of make test-versions and make test-sglang; elsewhere the import fails.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from exactness.reference import forced_gaps
from services.engine.torch.checkpoint import LOADING


def plain_model(base: Path) -> torch.nn.Module:
    """Return a model of one's own, for PEFT changes it."""
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype=torch.float32).eval()


def saved(base: Path, directory: Path, **config: Any) -> Path:
    """An adapter that PEFT has begun, with weights that change the model's answers."""
    model = peft.get_peft_model(plain_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape, generator=chance) * 0.3)
    model.save_pretrained(directory)
    return directory


def with_adapter(base: Path, directory: Path) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(plain_model(base), directory).eval()


def gap_of(model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far below the model's best logit the worst token is, in standard deviations."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return max(forced_gaps(logits.double(), tokens))
