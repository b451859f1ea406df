"""Sequences share a step's rows for drafts so that it gives most tokens for its seconds. This is pure.

A step of T seconds that is expected to give n tokens gains by one more draft if

    (n + chance of that draft) / (T + its seconds)  >  n / T

A sequence's j-th draft counts only if all before it are right: chance ** j. So they are taken one by one,
those first that give most for their seconds, until the next one gains nothing.

Where guessing takes time, too, it does by rounds: one guess for each that has not all of its own yet takes as
long as for one of them alone. So rounds are added as long as the best that can be had with them gains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace


@dataclass(frozen=True, slots=True)
class Candidate:
    most: int
    chance: float

    def tokens(self, count: int) -> float:
        return sum(self.chance**nth for nth in range(1, count + 1))


@dataclass(frozen=True, slots=True)
class StepCost:
    """It is the cost of a step without drafts, and of each draft in it; `limit_s` bounds the whole."""

    plain_s: float  # It is 0 where it was not measured, and then there are no drafts.
    draft_s: float
    limit_s: float | None = None

    def allows(self, step_s: float) -> bool:
        return self.limit_s is None or step_s <= self.limit_s


def share_rows(candidates: Sequence[Candidate], batch: int, max_drafts: int, cost: StepCost) -> list[int]:
    """Return drafts by candidate, `max_drafts` at the most; `batch` sequences get one token in any case."""
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
    """Return what share_rows does, where guessing takes `round_s` for each draft of whoever has most."""
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
