"""Requests that come at the same moment are placed one after the other, in the best order.

    turn --nobody came in the last GATHER_S--> through
      |--> waits --GATHER_S after the first, or when there are MOST--> ordered --> through, one by one
             |--cancelled: left out

Whoever is placed sooner stands before the others in a rank's queue. By arrival a long prompt would often
stand before short ones that came within the same milliseconds. Nobody is overtaken by one that came later,
and who comes alone does not wait.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")

GATHER_S = 0.002  # a burst takes a router longer than that to read
MOST = 32  # each is priced once more to be ordered, and nothing else is done meanwhile


class Burst(Generic[_T]):
    """Owned by one event loop. `order` gets those that came together, and returns their indices."""

    def __init__(self, order: Callable[[Sequence[_T]], Sequence[int]], gather_s: float = GATHER_S) -> None:
        self._order = order
        self._gather_s = gather_s
        self._last_came_s = -math.inf
        self._waiting: list[tuple[_T, asyncio.Future[None]]] = []
        self._timer: asyncio.Handle | None = None

    def __repr__(self) -> str:
        return f"<Burst waiting={len(self._waiting)}>"

    async def turn(self, request: _T) -> None:
        """Returns when it may be placed. The next one's turn comes when the caller awaits again."""
        loop = asyncio.get_running_loop()
        is_alone = loop.time() - self._last_came_s > self._gather_s
        self._last_came_s = loop.time()
        if is_alone and not self._waiting:
            return
        turn = loop.create_future()
        self._waiting.append((request, turn))
        if len(self._waiting) == MOST:
            self._set_timer(loop.call_soon(self._let_through))
        elif self._timer is None:
            self._set_timer(loop.call_later(self._gather_s, self._let_through))
        await turn

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _let_through(self) -> None:
        self._set_timer(None)
        waiting, self._waiting = [each for each in self._waiting if not each[1].done()], []
        try:
            order = self._order([request for request, _ in waiting])
        except Exception as error:  # or they would all wait for ever
            for _, turn in waiting:
                turn.set_exception(error)
            return
        for index in order:
            waiting[index][1].set_result(None)  # asyncio wakes them in this order
