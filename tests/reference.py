"""What transformers itself generates, greedily, and how to compare with it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# Below this gap between the two best logits, in standard deviations of all, rounding may choose.
NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Reference:
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # per token: best logit minus second best, over the standard deviation


@cache
def reference_model(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # generate on, as with ignore_eos
    model.generation_config.pad_token_id = 0
    return model.eval()


@cache
def reference_generation(directory: Path, prompt_ids: tuple[int, ...], max_tokens: int) -> Reference:
    """Greedy and in the checkpoint's dtype; end-of-sequence does not end it."""
    return reference_generations(directory, [prompt_ids], max_tokens)[0]


def reference_generations(
    directory: Path, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[Reference]:
    """The same for prompts of one length, as one batch."""
    prompt_ids = torch.tensor(prompts)
    generated = reference_model(directory).generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(generated.logits, dim=1).float()
    best = logits.topk(2).values
    gaps = (best[..., 0] - best[..., 1]) / logits.std(-1)
    rows = generated.sequences[:, prompt_ids.shape[1] :]
    return [Reference(tuple(r), tuple(g)) for r, g in zip(rows.tolist(), gaps.tolist(), strict=True)]


def count_near_ties(reference: Reference, token_ids: Sequence[int]) -> int:
    """0 when the tokens are the reference's, 1 when they part at a near tie (the rest is then free).

    Raises AssertionError when they part anywhere else.
    """
    assert len(token_ids) == len(reference.token_ids)
    for i, (expected, got) in enumerate(zip(reference.token_ids, token_ids, strict=True)):
        if expected != got:
            gap = reference.gaps[i]
            assert gap < NEAR_TIE, f"token {i} is {got}, not {expected}, with a gap of {gap:.1e} std"
            return 1
    return 0


def random_prompt(length: int, seed: int, vocab_size: int = 512) -> tuple[int, ...]:
    """Ids of ordinary characters of a `characters` checkpoint: no unknown, no end, no chat marker."""
    chance = random.Random(seed)
    return tuple(chance.randrange(4, vocab_size) for _ in range(length))
