"""Instead of states a mixer hands these through to a function that computes tokens one by one."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.torch.model.token_runs import TokenRuns

# It lets states that have waited take in the tokens that stay.
Take = Callable[[TokenRuns], object]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    of_slots: Tensor  # [num_slots, ...]
    runs: TokenRuns
    waiting: list[Take]

    @property
    def numbers(self) -> NDArray[np.float32] | None:
        """Return the memory in which they lie, for a kernel.

        It is None if it is not float32 in the host's memory.
        """
        states = self.of_slots
        if states.dtype != torch.float32 or states.device.type != "cpu":
            return None
        size = states.untyped_storage().nbytes() // states.itemsize
        numbers: NDArray[np.float32] = states.as_strided((size,), (1,), 0).numpy()
        return numbers

    def go_on(self, compute: Callable[[TokenRuns], Tensor]) -> Tensor:
        """Return what `compute` makes of the tokens.

        It is called once more when it is known which stay of those that wait.
        """
        if self.runs.some_wait:
            self.waiting.append(compute)
        return compute(self.runs)


@dataclass(frozen=True, slots=True)
class ConvStates:
    """A convolution's states are its last inputs [num_slots, channels, size].

    So the inputs of drafts tell all states.
    """

    of_slots: Tensor
    runs: TokenRuns
    waiting: list[Take]

    def before(self, inputs: Tensor) -> Tensor:
        """Return what is before each token, [num_tokens, channels, size].

        `inputs` are [num_tokens, channels, 1].
        """
        states = self.of_slots[self.runs.slots]
        run, place = self.runs.of_tokens
        columns = states.new_zeros(*states.shape[:-1], int(self.runs.counts.max()))
        columns[run, :, place] = inputs[..., 0].to(states.dtype)
        # The axes are [num_runs, channels, tokens + 1, size]: the state after so many of its tokens.
        windows = torch.cat([states, columns], dim=-1).unfold(-1, states.shape[-1], 1)
        self._store(self.runs.ended, windows, self.runs.lengths[self.runs.ended])
        if self.runs.some_wait:
            self.waiting.append(lambda kept: self._store(self.runs.waiting, windows, kept.lengths))
        return windows[run, :, place]

    def _store(self, runs: Tensor, windows: Tensor, counts: Tensor) -> None:
        self.of_slots[self.runs.slots[runs]] = windows[runs, :, counts]


def by_rounds(
    of_slots: Mapping[Name, Tensor],
    runs: TokenRuns,
    num_tokens: int,
    step: Callable[[dict[Name, Tensor], Tensor], Tensor],
) -> Tensor:
    """Return what becomes of `num_tokens`, the runs' and others; of those nothing becomes.

    `step` computes one token each of some runs: it is given their states [m, ..], by name, which it writes or
    replaces, and which tokens they are; it gives what becomes of these.
    """
    copies = {name: states[runs.slots] for name, states in of_slots.items()}
    output: Tensor | None = None
    for which, tokens in runs.rounds():
        own = {name: states[which] for name, states in copies.items()}
        mixed = step(own, tokens)
        if output is None:
            output = mixed.new_zeros(num_tokens, *mixed.shape[1:])
        output[tokens] = mixed
        for name, states in own.items():
            copies[name][which] = states
    for name, states in of_slots.items():
        states[runs.slots[runs.ended]] = copies[name][runs.ended]
    assert output is not None
    return output
