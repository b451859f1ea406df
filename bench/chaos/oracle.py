"""The oracle tells what transformers would have chosen after every token of an answer, in one forward pass an
answer.

Rounding may choose between two tokens that are as good as level; such a near tie is counted, and the rest of
the answer is checked after the token that was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from services.engine.fake import continuation
from services.engine.torch.sampling.torch_sampler import uniform

_NEAR_STD = 1e-4  # of two logits, in standard deviations of all: rounding stays below 3e-5
_NEAR_SHARE = 1e-4  # of the distribution that is drawn from

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Checked:
    """`wrong_at` is the place of the first wrong token; None: there is none."""

    num_tokens: int
    near_ties: frozenset[int]
    wrong_at: int | None


class Oracle:
    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)  # threads that spin for each other crawl on a machine that has other work
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, local_files_only=True, attn_implementation="sdpa"
        ).eval()

    def check(
        self, prompt_ids: Sequence[int], tokens: Sequence[int], temperature: float, seed: int
    ) -> Checked:
        """`temperature` 0 is greedy; else every token is drawn by (seed, position) from all of them."""
        near_ties = set()
        rows = self._logits([*prompt_ids, *tokens])[len(prompt_ids) - 1 :]
        for index, (row, token) in enumerate(zip(rows, tokens, strict=False)):
            if temperature == 0:
                right, near = _greedy(row, token)
            else:
                right, near = _drawn(row, token, temperature, uniform(seed, len(prompt_ids) + index))
            if near and not right:
                near_ties.add(index)
            elif not right:
                return Checked(index, frozenset(near_ties), index)
        return Checked(len(tokens), frozenset(near_ties), None)

    def _logits(self, ids: Sequence[int]) -> Floats:
        with torch.inference_mode():
            logits: Floats = self._model(torch.tensor([ids])).logits[0].double().numpy()
        return logits


class FakeOracle:
    def check(
        self, prompt_ids: Sequence[int], tokens: Sequence[int], temperature: float, seed: int
    ) -> Checked:
        right = continuation(prompt_ids, len(tokens))
        wrong = [index for index, token in enumerate(tokens) if token != right[index]]
        return Checked(len(tokens), frozenset(), wrong[0] if wrong else None)


def _greedy(row: Floats, token: int) -> tuple[bool, bool]:
    return int(row.argmax()) == token, bool(row.max() - row[token] < _NEAR_STD * row.std())


def _drawn(row: Floats, token: int, temperature: float, point: float) -> tuple[bool, bool]:
    """Return whether `point` falls into the token's part of the distribution, ids ascending, and whether it
    is as good as there."""
    weights = np.exp((row - row.max()) / temperature)
    upper = weights.cumsum() / weights.sum()
    lower = upper[token - 1] if token else 0.0
    right = bool(lower <= point < upper[token])
    return right, bool(lower - _NEAR_SHARE <= point < upper[token] + _NEAR_SHARE)
