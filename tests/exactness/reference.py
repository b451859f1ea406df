"""This module has what transformers itself generates, greedily, and how to compare with it.

An answer is judged by *teacher forcing*: one forward pass of transformers over the prompt and our answer
tells what it would have chosen after each token of ours. That takes a fifth to a thirtieth of what generating
takes, and goes on where two computations of one model part: they differ by rounding, and where the two best
logits are that close either token is right.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.engine.torch.checkpoint import LOADING

# Below this gap between the best logit and another, in standard deviations of all, rounding may choose:
# float32's stays below 3e-5 on our checkpoints (services/cli/model/make_model.py).
NEAR_TIE = 1e-4
BACKENDS = ("eager", "sdpa")  # attention of transformers' own


@dataclass(frozen=True)
class Reference:
    """The greedy answer to a prompt, in the checkpoint's dtype; end-of-sequence does not end it. It is
    generated when somebody looks at it."""

    directory: Path
    prompt_ids: tuple[int, ...]
    num_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.generated.token_ids

    @cached_property
    def generated(self) -> "Generated":
        return reference_generations(self.directory, [self.prompt_ids], self.num_tokens)[0]


@dataclass(frozen=True, slots=True)
class Generated:
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # per token: best logit minus second best, over the standard deviation


def reference_model(
    directory: Path, dtype: torch.dtype | None = None, attention: str | None = None
) -> PreTrainedModel:
    """`dtype` None: the checkpoint's; `attention` None: what transformers prefers. Each is loaded once."""
    return _load(directory, dtype, attention)


@cache
def _load(directory: Path, dtype: torch.dtype | None, attention: str | None) -> PreTrainedModel:
    with LOADING:  # a rank of this process may be starting
        model = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, attn_implementation=attention, dtype=dtype or "auto"
        )
    model.generation_config.eos_token_id = None  # generate on, as with ignore_eos
    model.generation_config.pad_token_id = 0
    return model.eval()


@cache
def reference_generation(directory: Path, prompt_ids: tuple[int, ...], max_tokens: int) -> Reference:
    return Reference(directory, prompt_ids, max_tokens)


def reference_generations(
    directory: Path, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[Generated]:
    """Generate answers to prompts of one length, as one batch."""
    prompt_ids = torch.tensor(prompts)
    answers = reference_model(directory).generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(answers.logits, dim=1).float()
    best = logits.topk(2).values
    gaps = (best[..., 0] - best[..., 1]) / logits.std(-1)
    rows = answers.sequences[:, prompt_ids.shape[1] :]
    return [Generated(tuple(row), tuple(own)) for row, own in zip(rows.tolist(), gaps.tolist(), strict=True)]


def forced_logits(
    directory: Path,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    dtype: torch.dtype | None = None,
    attention: str | None = None,
) -> torch.Tensor:
    """[tokens, vocab_size] in float64: from which each of `token_ids` is chosen after those before it."""
    ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]])
    with torch.inference_mode():
        logits = reference_model(directory, dtype, attention)(ids).logits[0, len(prompt_ids) - 1 :]
    return logits.double()


def forced_gaps(logits: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return how far below the best logit each token's is, in standard deviations of its row."""
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    gaps: list[float] = ((logits.max(-1).values - chosen) / logits.std(-1)).tolist()
    return gaps


def count_near_ties(reference: Reference, token_ids: Sequence[int]) -> int:
    """Return how many tokens are another choice than that of transformers after the tokens before them, each
    within a near tie.

    Raises AssertionError when one is further off, and when the answer is too long or too short.
    """
    assert len(token_ids) == reference.num_tokens
    return _count_near_ties(reference.directory, reference.prompt_ids, tuple(token_ids))


@cache
def _count_near_ties(directory: Path, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> int:
    logits = forced_logits(directory, prompt_ids, token_ids)
    gaps = forced_gaps(logits, token_ids)
    for i, (got, gap) in enumerate(zip(token_ids, gaps, strict=True)):
        assert gap < NEAR_TIE, f"token {i} is {got}, not {logits[i].argmax()}, with a gap of {gap:.1e} std"
    return sum(gap > 0 for gap in gaps)


def _half_precision_bound(
    exact: torch.Tensor,
    directory: Path,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    dtype: torch.dtype,
) -> float:
    """Return how far below the best logit of float32 a token may be that is best in `dtype`, in standard
    deviations.

    The logits of transformers' own backends in `dtype` are off those of float32 by up to some distance on
    this very text. Two logits that far off, one up and one down, change places across twice of it.
    """
    off = [
        (forced_logits(directory, prompt_ids, token_ids, dtype, attention) - exact).abs()
        for attention in BACKENDS
    ]
    return 2 * max((each / exact.std(-1, keepdim=True)).max().item() for each in off)


def check_half_precision(
    directory: Path, prompt_ids: Sequence[int], token_ids: Sequence[int], dtype: torch.dtype
) -> float:
    """The furthest that a token is below the best of float32, as a share of what it may be.

    Raises AssertionError when that is more than all of it.
    """
    return _check_half_precision(directory, tuple(prompt_ids), tuple(token_ids), dtype)


@cache
def _check_half_precision(
    directory: Path, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], dtype: torch.dtype
) -> float:
    exact = forced_logits(directory, prompt_ids, token_ids, torch.float32)
    gaps = forced_gaps(exact, token_ids)
    bound = _half_precision_bound(exact, directory, prompt_ids, token_ids, dtype)
    for i, gap in enumerate(gaps):
        assert gap <= bound, (
            f"token {i} is {gap:.2g} std below the best in float32; rounding to {dtype} explains {bound:.2g}"
        )
    return max(gaps) / bound


def random_prompt(length: int, seed: int, vocab_size: int = 512) -> tuple[int, ...]:
    """Ids of ordinary characters of a `characters` checkpoint: no unknown, no end, no chat marker."""
    chance = random.Random(seed)
    return tuple(chance.randrange(4, vocab_size) for _ in range(length))
