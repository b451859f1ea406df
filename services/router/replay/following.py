"""A router follows the load with plans, one after the other: how many ranks are wanted now.

More are wanted at once. Fewer are wanted once fewer have been enough for some minutes, each role by itself,
so that a lull takes no rank away.
"""

import math
from collections import deque
from dataclasses import dataclass

from services.router.replay.observed import Observation
from services.router.replay.planner import Goals, Outlook, Size, advise

_CHANCE = 4.0  # The halves of n requests differ by chance by so much over n's root: turns come together.
_LEAST_GROWTH, _MOST_GROWTH = 0.75, 1.5


@dataclass(frozen=True, slots=True)
class Job:
    observation: Observation
    goals: Goals
    load: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`wanted` is None where no number of ranks meets the goals."""

    present: Outlook
    wanted: Outlook | None


def plan(job: Job) -> Plan:
    advice = advise(job.observation, job.goals, job.load, in_steps=True)
    return Plan(advice.present, advice.least)


def growth(observation: Observation, now: float, window_s: float, ahead_s: float) -> float:
    """Return how many times the load of the window the load will be in `ahead_s`, if it goes on as it does.

    The window's halves are compared. What may be chance, by the number of requests, counts as no growth.
    """
    ages = [now - seen.arrival_s for seen in observation.requests if 0 <= now - seen.arrival_s < window_s]
    if not ages:
        return 1.0
    newer = sum(age < window_s / 2 for age in ages)
    change = (newer - (len(ages) - newer)) / (len(ages) / 2)
    beyond_chance = max(0.0, abs(change) - _CHANCE / math.sqrt(len(ages)))
    ratio = 1 + (beyond_chance if change > 0 else -beyond_chance) * (1 + 2 * ahead_s / window_s)
    return min(_MOST_GROWTH, max(_LEAST_GROWTH, ratio))


class Steady:
    """It is told what each plan wants, and says what is wanted now. The first time it takes the present ranks
    for wanted until then, as who begins to plan has seen too little to take any away."""

    def __init__(self, down_s: float) -> None:
        self._down_s = down_s
        self._planned: deque[tuple[float, Size]] = deque()

    def wanted(self, now: float, size: Size, present: Size) -> Size:
        if not self._planned:
            self._planned.append((now, present))
        elif self._down_s and self._planned[-1][0] < now - self._down_s:
            # No plan came for so long, which tells of no lull: what the last one wanted counts once more.
            self._planned.append((now, self._planned[-1][1]))
        self._planned.append((now, size))
        while self._planned[0][0] < now - self._down_s:
            self._planned.popleft()
        return Size(
            max(size.prefill for _, size in self._planned), max(size.decode for _, size in self._planned)
        )
