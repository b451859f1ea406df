"""How many pages those that run will still take: what admission keeps back for them.

If each generates what is expected of it, ends, and gives back what it has for itself, the pages taken
beyond today's rise and fall:

    pages   |        /|  /|      each slope: everyone left grows by a token a step
            |    /| / | / |/|    each fall: the one with the least to go ends
            | /|/ |/  |/    |
            +----------------+ steps

The highest point is the reserve. Keeping the sum of all growth back instead would leave a large part of the
pool idle, for they do not end at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# What is kept back for one sequence is bounded: max_tokens may be the whole context.
MAX_EXPECTED_TOKENS = 4096
_MIN_SHARE = 0.1
_LEARNING = 0.05


@dataclass(frozen=True, slots=True)
class Growing:
    """One sequence that holds pages, or would."""

    num_tokens: int
    num_pages: int  # of its table
    own_pages: int  # of those, what nobody else holds
    more_tokens: int  # expected still


def peak_growth(sequences: Sequence[Growing], page_size: int) -> int:
    """Pages they take beyond those they have, all together, when it is most."""
    growing = [seq for seq in sequences if seq.more_tokens > 0]
    if not growing:
        return 0
    growing.sort(key=lambda seq: seq.more_tokens)
    tokens, pages, own, more = (
        np.array([getattr(seq, name) for seq in growing])
        for name in ("num_tokens", "num_pages", "own_pages", "more_tokens")
    )
    # taken[k, j]: pages that j has taken when k, the k-th to end, is about to.
    taken = np.maximum(0, -(-(tokens[None, :] + more[:, None]) // page_size) - pages[None, :])
    still_there = np.arange(len(growing))[None, :] >= np.arange(len(growing))[:, None]
    given_back = np.concatenate(([0], np.cumsum(own)[:-1]))
    return max(0, int(((taken * still_there).sum(axis=1) - given_back).max()))


class OutputEstimate:
    """The share of what they may generate that sequences are expected to: learned from those that ended,
    lifted by every retraction, for that was one expectation too low."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __repr__(self) -> str:
        return f"OutputEstimate({self._share:.2f})"

    def more_tokens(self, allowed: int) -> int:
        """Expected of a sequence that may generate `allowed` more."""
        return round(self._share * min(allowed, MAX_EXPECTED_TOKENS))

    def ended(self, generated: int, allowed: int) -> None:
        used = min(1.0, generated / max(1, min(allowed, MAX_EXPECTED_TOKENS)))
        self._share = max(_MIN_SHARE, self._share + _LEARNING * (used - self._share))

    def retracted(self) -> None:
        self._share = (self._share + 1.0) / 2
