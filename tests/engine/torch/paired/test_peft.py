"""Adapters that PEFT itself has saved give the answers that PEFT itself computes (make test-versions)."""

import asyncio

import pytest

from engine.pair import Pair
from engine.torch.paired.families import checkpoint, new_text, torch_settings
from exactness.reference import NEAR_TIE
from services.values.rank import Plan

pytestmark = pytest.mark.exact
pefts = pytest.importorskip("exactness.pefts", reason="PEFT is not installed here: make test-versions")

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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_answers_are_pefts_own(family, tmp_path, subtests):
    base, prompt = checkpoint(family), new_text(45, 1)
    directories = {name: pefts.saved(base, tmp_path / name, **config) for name, config in KINDS.items()}
    lora = tuple(f"{name}={directory}" for name, directory in directories.items())
    async with Pair(torch_settings(family, lora=lora)) as pair:
        adapters = {each.name: each for each in pair.decode.adapters.loaded}
        asked = [(name, plan) for name in KINDS for plan in Plan]
        answers = await asyncio.gather(
            *(pair.generate(prompt, 24, plan, adapter=adapters[name]) for name, plan in asked)
        )
    alone = pefts.plain_model(base)
    for (name, plan), answer in zip(asked, answers, strict=True):
        with subtests.test(name, plan=plan):
            assert len(answer.tokens) == 24 and pefts.gap_of(alone, prompt, answer.tokens) > NEAR_TIE
            its = pefts.with_adapter(base, directories[name])
            assert pefts.gap_of(its, prompt, answer.tokens) < NEAR_TIE
