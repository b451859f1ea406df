"""Admission decides who comes in next, keeps pages back for growth, and measures the queue's rate.

This module is pure; the caller has the clock. Waiting requests are in the queue's order: by priority, then by
arrival. Normally the first one comes in. One behind it may overtake it in three cases:

    The first does not fit now, and the one behind it is smaller and fits. Pages would be idle otherwise.
    Running sequences hold half of the other's prompt or more. The batch reads shared pages once.
    The first would receive its KV, but would find no slot in the batch beside all that receive now, and the
    one behind it computes here. The slots would be empty until those have landed.

Nobody overtakes a request that was overtaken `overtakes` times, or for the first time `wait_s` ago. It comes
in as soon as enough running sequences have ended, so no request starves.

Growth tells how many more pages the running sequences will take; admission keeps these back. Suppose that
each sequence generates as much as is expected, then ends and gives back the pages that it shares with nobody.
The number of pages taken beyond today's then rises and falls:

    pages   |        /|  /|      each slope: everyone left grows by a token a step
            |    /| / | / |/|    each fall: the sequence with the fewest tokens to go ends
            | /|/ |/  |/    |
            +----------------+ steps

The highest point is the reserve. To keep back the sum of all growth would leave a large part of the pool
idle, because the sequences do not end at the same time.

    somebody waits --> taken, taken, came back, ... --> nobody waits: all is forgotten

The rate is measured only over time in which somebody always waits, because only then does the queue limit how
many come in.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

_SAMPLES = 64
_ENOUGH = 4  # The rate is unknown with fewer.


class QueueRate:
    def __init__(self) -> None:
        self._since_s: float | None = None  # The measured time began here; it is None while nobody waits.
        self._taken_s: deque[float] = deque()
        self._came_back = 0  # It counts those that came back and have not been replaced by another admission.

    def waits(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s

    def taken(self, now_s: float) -> None:
        """Note that a request came in; this is ignored where nobody was known to wait."""
        if self._came_back:
            self._came_back -= 1
            return
        if self._since_s is None:
            return
        self._taken_s.append(now_s)
        if len(self._taken_s) > _SAMPLES:
            self._since_s = self._taken_s.popleft()

    def came_back(self) -> None:
        """Note that an admitted request waits again; the next admission only makes up for it."""
        self._came_back += 1

    def empty(self) -> None:
        self._since_s = None
        self._taken_s.clear()
        self._came_back = 0

    def per_s(self, now_s: float) -> float:
        """Return how many requests come in per second, or 0: unknown. It falls while nobody comes in."""
        if self._since_s is None or len(self._taken_s) < _ENOUGH:
            return 0.0
        return len(self._taken_s) / max(now_s - self._since_s, 1e-3)


@dataclass(frozen=True, slots=True)
class Patience:
    overtakes: int = 16
    wait_s: float = 10.0
    # It is the number of first ones that are weighed, and of small-looking ones behind these.
    window: int = 32
    deadline_s: float = 30.0  # A deadline counts as far as it is within so long of its request's arrival.

    def is_over(self, overtaken: int, overtaken_for_s: float) -> bool:
        return overtaken >= self.overtakes or overtaken_for_s >= self.wait_s


@dataclass(frozen=True, slots=True)
class Newcomer:
    new_pages: int  # These are for the part of its prompt that is not cached.
    unheld_pages: int  # These cached pages of its prefix are evictable now, and locked once it is in.
    shares: bool  # Running sequences hold half of its prompt or more.
    overtaken: int
    overtaken_for_s: float  # It counts from the first time.
    # Of those that fit the one with the most comes first; the queue sets it where tenants have shares.
    preferred_pages: int = 0

    @property
    def preference(self) -> tuple[bool, int]:
        return not self.shares, -self.preferred_pages

    @property
    def num_pages(self) -> int:
        return self.new_pages + self.unheld_pages


def next_admission(queue: Sequence[Newcomer], fits: Callable[[int], bool], patience: Patience) -> int | None:
    reach = _reach(queue, patience)
    for index in sorted(range(reach), key=lambda index: (*queue[index].preference, index)):
        if fits(index):
            return index
    return None


def _reach(queue: Sequence[Newcomer], patience: Patience) -> int:
    for index, waiting in enumerate(queue):
        if patience.is_over(waiting.overtaken, waiting.overtaken_for_s):
            return index + 1
    return len(queue)


# What is kept back for one sequence is bounded, because max_tokens may be the whole context.
MAX_EXPECTED_TOKENS = 4096
_MIN_SHARE = 0.1
_LEARNING = 0.05


class Growing(NamedTuple):
    """A sequence that holds pages, or would hold them, is a row of numbers here; it is made anew at each
    admission."""

    num_tokens: int
    num_pages: int  # It is the length of the sequence's page table.
    own_pages: int  # It counts those that no other sequence holds.
    more_tokens: int  # It is expected to generate so many more.


class Growth:
    """It adds up the growth of running sequences, in time O(n * n) once, and O(n) for each newcomer."""

    def __init__(self, sequences: Sequence[Growing], page_size: int) -> None:
        growing = sorted([seq for seq in sequences if seq.more_tokens > 0], key=attrgetter("more_tokens"))
        columns = np.array(growing, dtype=int).reshape(-1, 4)
        self._tokens, self._pages, own, self._more = columns.T
        self._page_size = page_size
        # Entry k counts the pages that the first k to end give back.
        self._given_back = np.concatenate(([0], np.cumsum(own)))
        self._peaks = self._all_taken() - self._given_back[:-1]
        # It counts pages beyond those that the sequences have now.
        self.peak = max(0, int(self._peaks.max(initial=0)))

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
        """Return for each k how many pages the sequences left have taken when the k-th is about to end.

        Each entry (k, j) counts whole pages, and one more where the rest of k's tokens exceeds the slots that
        j has left in its last page. A division for each pair would take three times as long.
        """
        lacking = (-(-self._tokens // self._page_size) - self._pages).astype(np.int32)
        slots = (-self._tokens % self._page_size).astype(np.int32)
        whole, rest = (each.astype(np.int32)[:, None] for each in divmod(self._more, self._page_size))
        taken = np.maximum(0, lacking + whole + (rest > slots))
        return np.triu(taken).sum(axis=1)

    def _taken(self, tokens: Any, pages: Any) -> Any:
        return np.maximum(0, -(-tokens // self._page_size) - pages)


class OutputEstimate:
    """It is the share of their allowed tokens that sequences are expected to generate.

    It is learned from those that have ended. Each retraction raises it, because an expectation was too low.
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


BESIDE_LAST = 8  # A prompt has this part of a chunk beside the last chunk of another.


@dataclass(frozen=True, slots=True)
class Limits:
    max_running_requests: int = 64
    chunk_size: int = 512  # It counts prompt tokens per step.
    shorter_first: float = 2.0  # Shorter prompts overtake one with at most so many times what it lacks.
    itl_target_s: float | None = None  # It limits the batch, and the prompt chunks computed in the same step.
    expected_output: float = 0.5  # It is the expected share of max_tokens, until some sequences have ended.
    patience: Patience = field(default_factory=Patience)
    step_limit_s: float = 120.0  # A longer step counts as hung; 0 turns this off.

    def prompt_room(self, budget: int, left: int, withheld: int, *, beside_last: bool) -> int:
        """Return how many tokens of a step's budget a prompt may have that lacks `left`.

        Beside one whose last chunk is in the step it has few, unless they are its last, too: the other one's
        first token would wait for them. So many were `withheld` from it before: they are bounded as what
        overtakes it is, or a few tokens of others in each step would slow it down for ever.
        """
        if not beside_last or left <= budget or withheld >= self.shorter_first * left:
            return budget
        return min(budget, self.chunk_size // BESIDE_LAST)
