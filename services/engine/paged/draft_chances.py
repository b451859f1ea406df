"""The chances of drafts to be right tell how many of them are worth a step's rows. This is pure.

Acceptance estimates how often a sequence's drafts are right lately; at first it uses the rank's estimate. A
draft behind a wrong one proves nothing. So a guess with m right ids counts as m right drafts and, unless all
its ids were right, one wrong draft. This holds whether it was verified or not, because the sequence's next
ids show which were right. So a source that is wrong is observed without any rows, and can come back.

Sequences share a step's rows for drafts so that it gives most tokens per second. A step of T seconds that is
expected to give n tokens gains by one more draft if

    (n + chance of that draft) / (T + its seconds)  >  n / T

A sequence's j-th draft counts only if all before it are right: chance ** j. So drafts are added one by one,
those that give most for their seconds first, until the next one gains nothing.

Where guessing takes time too, it is done in rounds: one guess for each sequence that has not all of its own
takes as long as one guess for one sequence. So rounds are added as long as the best choice with them gains.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace

from services.values.rank_reports import DraftCount

Kind = tuple[str, int]  # It has the source, and the length of its match by its bits: 3, 4..7, 8..15, 16.

_SEQUENCE_FADING, _RANK_FADING = 0.95, 0.995  # A guess's weight is multiplied by this for each later one.
_PRIOR_WEIGHT = 1.5  # The rank's estimate weighs as much as so many drafts of the sequence.
_UNKNOWN = 0.5


@dataclass(slots=True)
class _Counts:
    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, fading: float) -> None:
        self.right = fading * self.right + right
        self.tried = fading * self.tried + tried

    def share(self, prior: float, weight: float) -> float:
        return (self.right + weight * prior) / (self.tried + weight)


class Acceptance:
    """It belongs to a sequence, or without `rank` to a whole rank."""

    def __init__(self, rank: "Acceptance | None" = None) -> None:
        self._rank = rank
        self._fading = _RANK_FADING if rank is None else _SEQUENCE_FADING
        self._counts: dict[Kind, _Counts] = {}

    def note(self, kind: Kind, right: int, tried: int) -> None:
        self._counts.setdefault(kind, _Counts()).add(right, tried, self._fading)
        if self._rank is not None:
            self._rank.note(kind, right, tried)

    def chance(self, kind: Kind) -> float:
        prior = self._rank.chance(kind) if self._rank is not None else _UNKNOWN
        counts = self._counts.get(kind)
        return counts.share(prior, _PRIOR_WEIGHT) if counts is not None else prior


def count_right(guess: Sequence[int], actual: Sequence[int]) -> tuple[int, int]:
    for index, (guessed, token_id) in enumerate(zip(guess, actual, strict=False)):
        if guessed != token_id:
            return index, index + 1
    compared = min(len(guess), len(actual))
    return compared, compared


class DraftCounts:
    def __init__(self) -> None:
        self._drafted = Counter[str]()
        self._accepted = Counter[str]()
        # It is the recent mean for a decoding sequence, or 0 before the first step.
        self.tokens_per_step = 0.0

    def __repr__(self) -> str:
        return f"DraftCounts({self.by_source()} tokens_per_step={self.tokens_per_step:.2f})"

    def note(self, source: str, drafted: int, accepted: int) -> None:
        self._drafted[source] += drafted
        self._accepted[source] += accepted

    def note_step(self, num_sequences: int, num_tokens: int) -> None:
        if num_sequences:
            mean = num_tokens / num_sequences
            before = self.tokens_per_step or mean
            self.tokens_per_step = 0.9 * before + 0.1 * mean

    def by_source(self) -> tuple[DraftCount, ...]:
        return tuple(
            DraftCount(source, drafted, self._accepted[source])
            for source, drafted in sorted(self._drafted.items())
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    most: int
    chance: float

    def tokens(self, count: int) -> float:
        return sum(self.chance**nth for nth in range(1, count + 1))


@dataclass(frozen=True, slots=True)
class StepCost:
    plain_s: float  # It is 0 where it was not measured, and then there are no drafts.
    draft_s: float
    limit_s: float | None = None

    def allows(self, step_s: float) -> bool:
        return self.limit_s is None or step_s <= self.limit_s


def share_rows(candidates: Sequence[Candidate], batch: int, max_drafts: int, cost: StepCost) -> list[int]:
    """Return drafts by candidate, at most `max_drafts`; `batch` sequences get one token in any case."""
    counts = [0] * len(candidates)
    if cost.plain_s <= 0.0:
        return counts
    step_s, tokens = cost.plain_s, float(batch)
    draft_s = max(1e-9, cost.draft_s)
    next_ones = [(-c.chance, i) for i, c in enumerate(candidates) if c.most > 0]
    heapify(next_ones)
    for _ in range(max_drafts):
        if not next_ones:
            break
        negative, index = next_ones[0]
        if -negative * step_s <= draft_s * tokens or not cost.allows(step_s + draft_s):
            break
        counts[index] += 1
        step_s, tokens = step_s + draft_s, tokens - negative
        if counts[index] < candidates[index].most:
            heapreplace(next_ones, (negative * candidates[index].chance, index))
        else:
            heappop(next_ones)
    return counts


def share_rounds(
    candidates: Sequence[Candidate], batch: int, max_drafts: int, cost: StepCost, round_s: float
) -> list[int]:
    """Do what share_rows does, where each round of guessing takes `round_s`."""
    best = [0] * len(candidates)
    if cost.plain_s <= 0.0:
        return best
    best_rate = batch / cost.plain_s
    for rounds in range(1, max((c.most for c in candidates), default=0) + 1):
        guessed = replace(cost, plain_s=cost.plain_s + rounds * round_s)
        within = [replace(c, most=min(c.most, rounds)) for c in candidates]
        counts = share_rows(within, batch, max_drafts, guessed)
        tokens = batch + sum(c.tokens(count) for c, count in zip(candidates, counts, strict=True))
        rate = tokens / (guessed.plain_s + cost.draft_s * sum(counts))
        if rate <= best_rate:
            break  # More rounds would not gain either: each gains at most as much as the one before.
        best, best_rate = counts, rate
    return best
