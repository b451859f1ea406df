"""This module has what transformers generates greedily under biases and bans, a whole forward pass for each
token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from exactness.reference import reference_model


@dataclass(frozen=True, slots=True)
class Rules:
    biases: Mapping[int, float] = field(default_factory=dict)
    bad: tuple[tuple[int, ...], ...] = ()  # of each the last id does not come after the others

    def banned_after(self, output: Sequence[int]) -> set[int]:
        return {
            last
            for *before, last in self.bad
            if any(list(output[start:]) == before for start in range(len(output) + 1))
        }


def ruled_generation(directory: Path, prompt: Sequence[int], count: int, rules: Rules) -> list[int]:
    """Raises AssertionError at a near tie, where rounding might choose."""
    model, output = reference_model(directory), list[int]()
    for _ in range(count):
        with torch.inference_mode():
            computed = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        logits = computed.double().clone()
        for token_id, bias in rules.biases.items():
            logits[token_id] += bias
        for token_id in rules.banned_after(output):
            logits[token_id] = -torch.inf
        best, second = logits.topk(2).values.tolist()
        assert best - second > 1e-4
        output.append(int(logits.argmax()))
    return output
