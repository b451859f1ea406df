import asyncio
import random


class Backoff:
    """Give waits that double from `first_s` to `max_s`; chance cuts each to between half and all of it."""

    def __init__(self, rng: random.Random, *, first_s: float = 0.05, max_s: float = 2.0) -> None:
        self._rng = rng
        self._first_s = first_s
        self._max_s = max_s
        self._attempts = 0

    def reset(self) -> None:
        self._attempts = 0

    def next_s(self) -> float:
        wait_s = min(self._max_s, self._first_s * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 32)
        return wait_s * self._rng.uniform(0.5, 1.0)

    async def sleep(self) -> None:
        await asyncio.sleep(self.next_s())
