"""A router follows the load with plans, one after the other: how many ranks are wanted now.

More are wanted at once. Fewer are wanted once fewer have been enough for some minutes, each role by itself,
so that a lull takes no rank away.
"""

from collections import deque
from dataclasses import dataclass

from services.router.replay.observed import Observation
from services.router.replay.planner import Goals, Outlook, Size, advise


@dataclass(frozen=True, slots=True)
class Job:
    observation: Observation
    goals: Goals


@dataclass(frozen=True, slots=True)
class Plan:
    """`wanted` is None where no number of ranks meets the goals."""

    present: Outlook
    wanted: Outlook | None


def plan(job: Job) -> Plan:
    advice = advise(job.observation, job.goals)
    return Plan(advice.present, advice.least)


class Steady:
    """It is told what each plan wants, and says what is wanted now."""

    def __init__(self, down_s: float) -> None:
        self._down_s = down_s
        self._planned: deque[tuple[float, Size]] = deque()

    def wanted(self, now: float, size: Size) -> Size:
        self._planned.append((now, size))
        while self._planned[0][0] < now - self._down_s:
            self._planned.popleft()
        return Size(
            max(size.prefill for _, size in self._planned), max(size.decode for _, size in self._planned)
        )
