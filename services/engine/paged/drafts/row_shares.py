"""Which sequences verify how many drafts in a step: those that give most tokens for its seconds. Pure.

A step of T seconds that is expected to give n tokens gains by one more draft if

    (n + chance of that draft) / (T + its seconds)  >  n / T

A sequence's j-th draft counts only if all before it are right: chance ** j. So they are taken one by one,
those first that give most for their seconds, until the next one gains nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace


@dataclass(frozen=True, slots=True)
class Candidate:
    """The most drafts that a sequence may have, and the chance of one behind right ones."""

    most: int
    chance: float
    guess_s: float = 0.0  # that guessing takes, each


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of a step without drafts, and of each draft in it; `limit_s` bounds the whole."""

    plain_s: float  # 0: not measured, and then there are no drafts
    draft_s: float
    limit_s: float | None = None

    def allows(self, step_s: float) -> bool:
        return self.limit_s is None or step_s <= self.limit_s


def share_rows(candidates: Sequence[Candidate], batch: int, max_drafts: int, cost: StepCost) -> list[int]:
    """Drafts by candidate, `max_drafts` at the most; `batch` sequences get one token in any case."""
    counts = [0] * len(candidates)
    if cost.plain_s <= 0.0:
        return counts
    step_s, tokens = cost.plain_s, float(batch)
    seconds = [max(1e-9, cost.draft_s + candidate.guess_s) for candidate in candidates]
    next_ones = [(-c.chance / seconds[i], i, c.chance) for i, c in enumerate(candidates) if c.most > 0]
    heapify(next_ones)
    for _ in range(max_drafts):
        if not next_ones:
            break
        _, index, chance = next_ones[0]
        if chance * step_s <= seconds[index] * tokens or not cost.allows(step_s + seconds[index]):
            break
        counts[index] += 1
        step_s, tokens, chance = step_s + seconds[index], tokens + chance, chance * candidates[index].chance
        if counts[index] < candidates[index].most:
            heapreplace(next_ones, (-chance / seconds[index], index, chance))
        else:
            heappop(next_ones)
    return counts
