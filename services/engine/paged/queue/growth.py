"""Growth tells how many pages those that run will still take: admission keeps these back for them.

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
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

# What is kept back for one sequence is bounded: max_tokens may be the whole context.
MAX_EXPECTED_TOKENS = 4096
_MIN_SHARE = 0.1
_LEARNING = 0.05


class Growing(NamedTuple):
    """It is one sequence that holds pages, or would: a row of numbers, which each that runs has at each
    admission."""

    num_tokens: int
    num_pages: int  # It counts its table.
    own_pages: int  # Nobody else holds so many of these.
    more_tokens: int  # So many are expected still.


class Growth:
    """It adds up those that run. It costs the square of their number once, a newcomer their number."""

    def __init__(self, sequences: Sequence[Growing], page_size: int) -> None:
        growing = sorted([seq for seq in sequences if seq.more_tokens > 0], key=attrgetter("more_tokens"))
        columns = np.array(growing, dtype=int).reshape(-1, 4)
        self._tokens, self._pages, own, self._more = columns.T
        self._page_size = page_size
        self._given_back = np.concatenate(([0], np.cumsum(own)))  # The first k to end give back so many.
        self._peaks = self._all_taken() - self._given_back[:-1]
        self.peak = max(0, int(self._peaks.max(initial=0)))  # They take so many pages beyond those they have.

    def peak_with(self, newcomer: Growing) -> int:
        more = newcomer.more_tokens
        if more <= 0:
            return self.peak
        own_taken = self._taken(newcomer.num_tokens + self._more, newcomer.num_pages)
        peaks = self._peaks + np.where(self._more <= more, own_taken, -newcomer.own_pages)
        ended = int(self._more.searchsorted(more, side="right"))
        others = self._taken(self._tokens[ended:] + more, self._pages[ended:]).sum()
        last = others - self._given_back[ended] + self._taken(newcomer.num_tokens + more, newcomer.num_pages)
        return max(0, int(peaks.max(initial=0)), int(last))

    def _all_taken(self) -> Any:
        """Return the pages that those left have taken together when the k-th to end is about to, for each k.

        They are read off a square: in whole pages, and one more where the rest of k's tokens is more than the
        slots that j has left in its last page. A division for each pair would take thrice as long.
        """
        lacking = (-(-self._tokens // self._page_size) - self._pages).astype(np.int32)
        slots = (-self._tokens % self._page_size).astype(np.int32)
        whole, rest = (each.astype(np.int32)[:, None] for each in divmod(self._more, self._page_size))
        taken = np.maximum(0, lacking + whole + (rest > slots))
        return np.triu(taken).sum(axis=1)

    def _taken(self, tokens: Any, pages: Any) -> Any:
        return np.maximum(0, -(-tokens // self._page_size) - pages)


class OutputEstimate:
    """It is the share of what they may generate that sequences are expected to.

    It is learned from those that ended and lifted by every retraction, for that was one expectation too low.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def __repr__(self) -> str:
        return f"OutputEstimate({self._share:.2f})"

    def more_tokens(self, allowed: int) -> int:
        return round(self._share * min(allowed, MAX_EXPECTED_TOKENS))

    def ended(self, generated: int, allowed: int) -> None:
        used = min(1.0, generated / max(1, min(allowed, MAX_EXPECTED_TOKENS)))
        self._share = max(_MIN_SHARE, self._share + _LEARNING * (used - self._share))

    def retracted(self) -> None:
        self._share = (self._share + 1.0) / 2
