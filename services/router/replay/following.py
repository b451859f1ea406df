"""A router follows the load with plans, one after the other: how many ranks are wanted now.

More are wanted at once. Fewer are wanted once fewer have been enough for some minutes, each role by itself,
so that a lull takes no rank away.
"""

from collections import deque
from dataclasses import dataclass

from services.router.replay.observed import Observation
from services.router.replay.planner import Goals, Outlook, Size, advise


@dataclass(frozen=True, slots=True)
class PlannerJob:
    observation: Observation
    goals: Goals
    load: float = 1.0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """`wanted` is None where no number of ranks meets the goals."""

    present: Outlook
    wanted: Outlook | None


def plan(job: PlannerJob) -> RankPlan:
    advice = advise(job.observation, job.goals, job.load, in_steps=True)
    return RankPlan(advice.present, advice.least)


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
