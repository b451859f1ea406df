"""Adapters that PEFT itself has saved give the answers that PEFT itself computes (make test-versions)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.pair import Pair
from engine.torch.paired.families import checkpoint, new_text, torch_settings
from exactness.reference import NEAR_TIE, forced_gaps
from services.engine.torch.checkpoint import LOADING
from services.values.rank import Plan

pytestmark = pytest.mark.exact
peft = pytest.importorskip("peft", reason="PEFT is only in the environments of make test-versions")

KINDS = {
    "plain": dict(r=4, lora_alpha=8, target_modules="all-linear"),
    "rslora": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True),
    "patterns": dict(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\..*": 6},
        alpha_pattern={"1.mlp.down_proj": 3, ".*o_proj": 16},
        lora_dropout=0.1,
    ),
    "one_layer": dict(r=3, lora_alpha=3, target_modules=["k_proj", "up_proj"], layers_to_transform=[1]),
}


def plain_model(base: Path) -> torch.nn.Module:
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


def gap_of(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> float:
    """How far below the model's best logit the worst token is, in standard deviations."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return max(forced_gaps(logits.double(), tokens))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_answers_are_pefts_own(family, tmp_path, subtests):
    base, prompt = checkpoint(family), new_text(45, 1)
    directories = {name: saved(base, tmp_path / name, **config) for name, config in KINDS.items()}
    lora = tuple(f"{name}={directory}" for name, directory in directories.items())
    async with Pair(torch_settings(family, lora=lora)) as pair:
        adapters = {each.name: each for each in pair.decode.adapters.loaded}
        asked = [(name, plan) for name in KINDS for plan in Plan]
        answers = await asyncio.gather(
            *(pair.generate(prompt, 24, plan, adapter=adapters[name]) for name, plan in asked)
        )
    alone = plain_model(base)
    for (name, plan), answer in zip(asked, answers, strict=True):
        with subtests.test(name, plan=plan):
            assert len(answer.tokens) == 24 and gap_of(alone, prompt, answer.tokens) > NEAR_TIE
            its = peft.PeftModel.from_pretrained(plain_model(base), directories[name]).eval()
            assert gap_of(its, prompt, answer.tokens) < NEAR_TIE
