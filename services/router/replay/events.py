"""Virtual time: what is to happen, in order."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Events:
    """Calls what is due; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        heappush(self._heap, (max(time_s, self.now), next(self._numbers), action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + delay_s, action, *arguments)

    def run(self) -> None:
        while self._heap:
            self.now, _, action, arguments = heappop(self._heap)
            action(*arguments)
