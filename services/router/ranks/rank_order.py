"""Ranks are kept in ascending order of load while the loads change, and each of several routers has a share
of them. The module is pure.

A router learns of another router's requests only from the ranks' next reports. Two routers with a request at
the same moment would both choose the rank with the shortest queue. So each prefers the ranks of its own share
among those of about the same cost. A share is only a preference: each router may choose any rank, and shares
that two routers see differently for a moment do no harm.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop
from itertools import islice
from operator import itemgetter
from typing import TypeVar

from services.values.rank import RankKey

Load = tuple[float, int]  # These are a usual prompt's seconds there and, for equal ones, the requests.

_rank_of = itemgetter(1)


class LoadOrder:
    """`update` costs O(log ranks) and a short memmove. Equal loads are in the order of their keys."""

    def __init__(self, loads: Iterable[tuple[RankKey, Load]]) -> None:
        self._loads = dict(loads)
        self._order = sorted((load, rank) for rank, load in self._loads.items())

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[RankKey]:
        return map(_rank_of, self._order)

    def ascending(self, ranks: Iterable[RankKey], before: RankKey | None = None) -> Iterator[RankKey]:
        """Yield those of `ranks` that are in the order, in that order, and only those before `before`.

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
    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"no share: {self}")

    def own(self, ranks: Iterable[_T]) -> frozenset[_T]:
        """Return this router's part of a role's ranks, which all routers must list in the same order. It is
        never empty: where there are more routers than ranks, several share one."""
        every = list(ranks)
        step = max(1, min(self.of, len(every)))
        return frozenset(islice(every, self.index % step, None, step))
