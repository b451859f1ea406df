"""Whether a request would wait too long wherever it goes, told before it is worked out where that is. Pure.

It is asked of every request, and where all ranks are full nothing else is, so it looks at few. One rank that
is in time will do; and where ranks are many they stand in the order of load: if the first ones do not compute
in time, neither do the others, unless what they lack is room. When a decode rank has room is in no order.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf

from services.values.rank import Plan, RankKey
from services.values.registration import Registration

_SOONEST = 64  # of a role


@dataclass(frozen=True, slots=True)
class Queues:
    """How many seconds the next request waits at a rank."""

    plans: Container[Plan]
    receives: Callable[[RankKey], bool]  # whether a decode rank does the prefill ranks' KV
    room_s: Callable[[RankKey], float]  # at a decode rank
    compute_s: Callable[[RankKey], float]

    def shortest_s(
        self, decodes: Iterable[Registration], prefills: Iterable[Registration], enough_s: float
    ) -> float:
        """Of ranks that may be chosen but for the wait, at the best that were looked at; 0 as soon as one is
        found, or each of a pair, where it is no more than `enough_s`. Infinite: there is nowhere to go."""
        sender_s = self._sender_s(prefills, enough_s)
        shortest_s, looked_at = inf, 0
        for rank in decodes:
            key = rank.id.key
            room_s = self.room_s(key)
            if room_s >= shortest_s:
                continue
            theirs_s = sender_s if self.receives(key) else inf
            own_s = self.compute_s(key) if Plan.LOCAL in self.plans else inf
            if room_s <= enough_s:
                if min(theirs_s, own_s) <= enough_s:
                    return 0.0
                looked_at += 1
            shortest_s = min(shortest_s, room_s + theirs_s, max(room_s, own_s))
            if looked_at == _SOONEST and sender_s > enough_s:
                break
        return shortest_s

    def _sender_s(self, prefills: Iterable[Registration], enough_s: float) -> float:
        """Until a prefill rank computes it."""
        shortest_s = inf
        if Plan.REMOTE in self.plans:
            for rank in islice(prefills, _SOONEST):
                shortest_s = min(shortest_s, self.compute_s(rank.id.key))
                if shortest_s <= enough_s:
                    break
        return shortest_s
