"""What bench.families makes of windows, recurrent layers, experts and latents is hard to fake."""

import pytest
import torch
from transformers import AutoConfig

from bench.families import FAMILIES
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt, reference_model
from services.cli.model.make_model import make_model
from services.values.errors import ConfigError

LEN = 200
pytestmark = pytest.mark.exact


def last_logits(directory, prompts):
    with torch.inference_mode():
        return reference_model(directory)(input_ids=torch.tensor(prompts), use_cache=False).logits[:, -1]


def changes_of_logits(directory, prompt, positions):
    """Of one changed token each, in standard deviations of the logits."""
    prompts = [prompt]
    for position in positions:
        changed = 4 + (prompt[position] - 4 + 77) % 508
        prompts.append((*prompt[:position], changed, *prompt[position + 1 :]))
    plain, *others = last_logits(directory, prompts)
    return [((other - plain).square().mean().sqrt() / plain.std()).item() for other in others]


def early_tokens_count_as_well_as_late_ones(architecture):
    positions = [0, 1, 2, *range(5, LEN - 24, 13)]
    for seed in range(2):
        prompt = random_prompt(LEN, seed)
        assert min(changes_of_logits(tiny_checkpoint(architecture), prompt, positions)) > 0.01


def test_all_that_mistral_with_a_window_sees_counts_and_nothing_else():
    directory, prompt = tiny_checkpoint("mistral", window=24), random_prompt(60, seed=0)
    first = 60 - 1 - 2 * 23  # two layers, each of which looks back to 23 tokens
    assert min(changes_of_logits(directory, prompt, range(first, 60, 5))) > 1e-3
    assert max(changes_of_logits(directory, prompt, range(first))) == 0


def greedy_output_is_no_loop(architecture):
    prompt = torch.tensor([random_prompt(60, seed=3)])
    output = reference_model(tiny_checkpoint(architecture)).generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=32
    )
    assert len(set(output[0, 60:].tolist())) >= 12


def sizes_are_those_that_were_asked_for(architecture, tmp_path):
    sizes = dict(hidden_size=32, num_layers=6, num_heads=2, num_kv_heads=1, vocab_size=200)
    make_model(tmp_path, FAMILIES[architecture], **sizes)
    config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 6, 200)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families(architecture, tmp_path):
    early_tokens_count_as_well_as_late_ones(architecture)
    greedy_output_is_no_loop(architecture)
    sizes_are_those_that_were_asked_for(architecture, tmp_path)


def test_settings_beside_the_sizes(subtests, tmp_path_factory):
    for architecture in ["mistral", "gpt_oss", "gemma3"]:
        with subtests.test("a window is as wide as was asked for", architecture=architecture):
            tmp_path = tmp_path_factory.mktemp("case")
            make_model(tmp_path, FAMILIES.get(architecture, architecture), window=40)
            assert AutoConfig.from_pretrained(tmp_path, local_files_only=True).sliding_window == 40
    with subtests.test("a model without windows takes none"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="llama has no window"):
            make_model(tmp_path / "model", "llama", window=24)
    with subtests.test("what a config holds beside sizes may be changed"):
        tmp_path = tmp_path_factory.mktemp("case")
        make_model(tmp_path, FAMILIES["qwen3_5"], changes={"linear_key_head_dim": 32})
        assert AutoConfig.from_pretrained(tmp_path, local_files_only=True).linear_key_head_dim == 32
