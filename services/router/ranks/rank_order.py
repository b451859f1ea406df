"""Ranks in ascending order of load, kept so while the loads change. Pure.

Each of several routers has a share of the ranks.

What another router has just sent is known only from the ranks' next reports. Two that are asked at the same
moment would both choose the rank with the shortest queue. So each prefers the ranks of its own share among
those that cost about the same. A share is no right: everyone may choose any rank, and shares that two routers
see differently for a moment do no harm.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop
from itertools import islice
from operator import itemgetter
from typing import TypeVar

from services.values.rank import RankKey

Load = tuple[float, int]  # seconds that a usual prompt costs there; of equal ones, requests there

_rank_of = itemgetter(1)


class LoadOrder:
    """`update` costs O(log ranks) and a short memmove. Equal loads stand in the order of their keys."""

    def __init__(self, loads: Iterable[tuple[RankKey, Load]]) -> None:
        self._loads = dict(loads)
        self._order = sorted((load, rank) for rank, load in self._loads.items())

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[RankKey]:
        return map(_rank_of, self._order)

    def ascending(self, ranks: Iterable[RankKey], before: RankKey | None = None) -> Iterator[RankKey]:
        """Those of `ranks` that stand in it, as they do; only those that stand before one of them.

        The first costs O(ranks), each further one O(log ranks).
        """
        known = [(self._loads[rank], rank) for rank in ranks if rank in self._loads]
        if before is not None:
            end = self._loads[before], before
            known = [entry for entry in known if entry < end]
        heapify(known)
        while known:
            yield heappop(known)[1]

    def update(self, rank: RankKey, load: Load) -> None:
        before = self._loads[rank]
        if load != before:
            del self._order[bisect_left(self._order, (before, rank))]
            insort(self._order, (load, rank))
            self._loads[rank] = load


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Share:
    """This is the share of the `index`-th, from 0, of `of` routers."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"no share: {self}")

    def own(self, ranks: Iterable[_T]) -> frozenset[_T]:
        """Return this router's of all ranks of a role, in the order that all routers have them in. They are
        never none: where there are more routers than ranks, several share one."""
        every = list(ranks)
        step = max(1, min(self.of, len(every)))
        return frozenset(islice(every, self.index % step, None, step))
