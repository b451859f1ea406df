"""Nemotron-H's definition bounds the time step from below (`time_step_min`) where it computes several tokens,
and not where it computes one. So a state that decode has made is not quite the one that a prompt makes.

What has to hold all the same: prefill computes prompts as `generate` does, decode single tokens likewise.
What cannot: an answer that goes on from a state of decode's, under plan local and after a retraction.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.pair import Pair
from engine.torch.paired.families import Talk, checkpoint, new_text, torch_settings
from exactness.reference import reference_generation
from services.values.rank import Plan

STEP_BIAS = -9.0  # softplus of it is 1e-4: nine of ten time steps are below the bound, 1e-3
NO_BOUND = 1e-12
LENGTHS = (50, 3, 40)


@pytest.fixture(scope="module", params=["bound", "no-bound"])
def settings(request, tmp_path_factory):
    """Make a checkpoint most of whose time steps are below the bound, if there is one."""
    directory = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(checkpoint("nemotron_h"), directory)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if "dt_bias" in name:
            weight.fill_(STEP_BIAS)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    if request.param == "no-bound":
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"time_step_min": NO_BOUND}))
    return replace(torch_settings("nemotron_h"), model=str(directory))


class GeneratedTalk(Talk):
    """Its answers are those of `generate`: one forward pass has the formula of prompts for all tokens."""

    def check(self, prompt_ids, answer):
        directory, prompt = Path(self.pair.settings.model), tuple(prompt_ids)
        assert tuple(answer.tokens) == reference_generation(directory, prompt, len(answer.tokens)).token_ids


@pytest.mark.exact
async def test_each_formula_is_where_generate_has_it(settings):
    """The check at start is on: it finds out that short chunks must not go as single tokens here."""
    async with Pair(settings) as pair:
        for plan in Plan:
            await GeneratedTalk(pair).turn(new_text(LENGTHS[0], 1), plan, max_tokens=30)
        talk = GeneratedTalk(pair)
        for seed, length in enumerate(LENGTHS):
            await talk.turn(new_text(length, 10 + seed), max_tokens=30)
        if "no-bound" in settings.model:
            for seed, length in enumerate(LENGTHS):
                await talk.turn(new_text(length, 20 + seed), Plan.LOCAL, max_tokens=30)
