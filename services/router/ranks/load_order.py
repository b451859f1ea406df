"""Ranks in ascending order of load, kept so while the loads change. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop
from operator import itemgetter

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
