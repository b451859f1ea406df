"""Recurrent layers compute these tokens one by one: a sequence's newest, and the drafts behind it.

plain      the state takes the token in
drafted    every token is computed from the state that the one before it would leave, and the state stays as
           it is; when it is known which tokens stay, it takes in those (StepCache.waiting)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.engine.torch.device import send
from services.engine.torch.model.recurrence_kernel import Ids, Runs


@dataclass(frozen=True)
class TokenRuns:
    """Run i is tokens [firsts[i], firsts[i] + counts[i]) of those that are computed so, in their order."""

    slots: Tensor  # int64 [num_runs], where the state of each is
    firsts: Ids
    counts: Ids
    waits: NDArray[np.bool]  # its state takes nothing in yet

    @cached_property
    def some_wait(self) -> bool:
        return bool(self.waits.any())

    @cached_property
    def are_plain(self) -> bool:
        return len(self.firsts) == self.num_tokens and not self.some_wait

    @cached_property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def lengths(self) -> Tensor:
        return self._ids(self.counts)

    @cached_property
    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return of each token its run, and its place in that.

        It is not for what is kept, where tokens lie between.
        """
        runs = np.repeat(np.arange(len(self.counts)), self.counts)
        places = np.arange(len(runs)) - np.repeat(self.firsts, self.counts)
        return self._ids(runs), self._ids(places)

    @cached_property
    def ended(self) -> Tensor:
        return self._ids(np.flatnonzero(~self.waits))

    @cached_property
    def waiting(self) -> Tensor:
        return self._ids(np.flatnonzero(self.waits))

    def rounds(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the runs and their first tokens, then those that have a second one with it, and so on."""
        for nth in range(self.counts.max(initial=0)):
            runs = np.flatnonzero(self.counts > nth)
            yield self._ids(runs), self._ids(self.firsts[runs] + nth)

    def kept(self, counts: Sequence[int]) -> "TokenRuns":
        """Keep of those that wait the first tokens, as many as `counts` says: these are taken in."""
        runs = np.flatnonzero(self.waits)
        return TokenRuns(
            slots=self.slots[self.waiting],
            firsts=self.firsts[runs],
            counts=np.array(counts, np.int64),
            waits=np.zeros(len(runs), np.bool),
        )

    def of_numbers(self, of_slots: Tensor) -> Runs:
        starts = self.slots.numpy() * of_slots.stride(0) + of_slots.storage_offset()
        return Runs(starts, self.firsts, self.firsts + self.counts, self.waits)

    def _ids(self, ids: NDArray[Any]) -> Tensor:
        (sent,) = send([ids], self.slots.device)
        return sent
