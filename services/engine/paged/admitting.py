"""Admitting: who comes in next, how many pages are kept back for growth, and how fast a queue gets shorter.

This module is pure, and the caller has the clock. The requests that wait are in the queue's order: by
priority, then by arrival. Normally the first of them comes in. One behind it may overtake it in three cases:

    The first does not fit now, and the one behind it is smaller and fits. Pages would be idle otherwise.
    Running sequences hold half of the other's prompt or more. The batch reads shared pages once.
    The first would receive its KV, but will find no place in the batch beside all that receive now, and the
    one behind it computes here. The places would be empty until those have landed.

A request that was overtaken `overtakes` times, or for the first time `wait_s` ago, is not overtaken any more.
It comes in as soon as enough running sequences have ended, so no request starves.

Growth tells how many pages those that run will still take: admission keeps these back for them. If each
generates what is expected of it, ends, and gives back what it has for itself, the pages taken beyond today's
rise and fall:

    pages   |        /|  /|      each slope: everyone left grows by a token a step
            |    /| / | / |/|    each fall: the one with the least to go ends
            | /|/ |/  |/    |
            +----------------+ steps

The highest point is the reserve. Keeping the sum of all growth back instead would leave a large part of the
pool idle, for they do not end at once.

    someone waits --> taken, taken, came back, ... --> nobody waits: forgotten

The rate is measured in the time in which somebody waits all along, for only then is it the queue that limits
how many come in.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

_SAMPLES = 64
_ENOUGH = 4  # Fewer say nothing.


class QueueRate:
    def __init__(self) -> None:
        self._since_s: float | None = None  # The measured time began here; None: nobody waits.
        self._taken_s: deque[float] = deque()
        self._came_back = 0  # No other has come in for these yet.

    def waits(self, now_s: float) -> None:
        """Note that somebody waits, perhaps behind others."""
        if self._since_s is None:
            self._since_s = now_s

    def taken(self, now_s: float) -> None:
        """Note that one came in; where nobody was known to wait, that says nothing."""
        if self._came_back:
            self._came_back -= 1
            return
        if self._since_s is None:
            return
        self._taken_s.append(now_s)
        if len(self._taken_s) > _SAMPLES:
            self._since_s = self._taken_s.popleft()

    def came_back(self) -> None:
        """Note that one that had come in waits again: the next that comes in leaves the queue as long as
        before."""
        self._came_back += 1

    def empty(self) -> None:
        """Note that nobody waits any more."""
        self._since_s = None
        self._taken_s.clear()
        self._came_back = 0

    def per_s(self, now_s: float) -> float:
        """Return how many come in per second; 0: not known. It falls while nobody comes in."""
        if self._since_s is None or len(self._taken_s) < _ENOUGH:
            return 0.0
        return len(self._taken_s) / max(now_s - self._since_s, 1e-3)


@dataclass(frozen=True, slots=True)
class Patience:
    overtakes: int = 16
    wait_s: float = 10.0
    window: int = 32  # The first so many are weighed and, of those behind, so many that look small.

    def is_over(self, overtaken: int, overtaken_for_s: float) -> bool:
        """Return whether one that was overtaken so often, and first so long ago, may be no more."""
        return overtaken >= self.overtakes or overtaken_for_s >= self.wait_s


@dataclass(frozen=True, slots=True)
class Newcomer:
    new_pages: int  # They are for what is not cached.
    unheld_pages: int  # Nobody holds these of its cached prefix: they are no longer evictable once it is in.
    shares: bool  # Those that run hold half of its prompt or more.
    overtaken: int
    overtaken_for_s: float  # It counts from the first time.

    @property
    def num_pages(self) -> int:
        return self.new_pages + self.unheld_pages


def next_admission(queue: Sequence[Newcomer], fits: Callable[[int], bool], patience: Patience) -> int | None:
    """Return the index of who comes in next; `fits(index)` says whether there is room."""
    reach = _reach(queue, patience)
    for index in sorted(range(reach), key=lambda index: (not queue[index].shares, index)):
        if fits(index):
            return index
    return None


def _reach(queue: Sequence[Newcomer], patience: Patience) -> int:
    """Return how many, from the first on, may be chosen from: nobody behind one whose patience is at its
    end."""
    for index, waiting in enumerate(queue):
        if patience.is_over(waiting.overtaken, waiting.overtaken_for_s):
            return index + 1
    return len(queue)


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


@dataclass(frozen=True, slots=True)
class Limits:
    max_running_requests: int = 64
    chunk_size: int = 512  # It counts prompt tokens per step.
    itl_target_s: float | None = None  # It bounds the batch, and prompt chunks beside it.
    expected_output: float = 0.5  # This share of max_tokens is expected of a sequence until some have ended.
    patience: Patience = field(default_factory=Patience)
    step_limit_s: float = 120.0  # A step that takes longer counts as hung; with 0 none does.
