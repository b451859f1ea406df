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

_SOONEST = 64  # of each order

# That may be chosen, but for the wait. Each order is of one handshake version.
Orders = Iterable[Iterable[Registration]]


@dataclass(frozen=True, slots=True)
class Queues:
    """How many seconds the next request waits at a rank."""

    plans: Container[Plan]
    receives: Callable[[RankKey], bool]  # whether a decode rank does the prefill ranks' KV
    room_s: Callable[[RankKey], float]  # at a decode rank
    compute_s: Callable[[RankKey], float]

    def shortest_s(self, decodes: Orders, prefills: Orders, enough_s: float) -> float:
        """At the best that were looked at; 0 as soon as one is found, or each of a pair, where it is no more
        than `enough_s`. Infinite: the request can go nowhere."""
        senders_s = self._senders_s(prefills, enough_s)
        any_sends = any(wait_s <= enough_s for wait_s in senders_s.values())
        shortest_s = inf
        for order in decodes:
            looked_at = 0
            for rank in order:
                room_s = self.room_s(rank.id.key)
                if room_s >= shortest_s:
                    continue
                sender_s, own_s = self._computes_s(rank, senders_s)
                if room_s <= enough_s:
                    if min(sender_s, own_s) <= enough_s:
                        return 0.0
                    looked_at += 1
                shortest_s = min(shortest_s, room_s + sender_s, max(room_s, own_s))
                if looked_at == _SOONEST and not any_sends:
                    break
        return shortest_s

    def _computes_s(self, decode: Registration, senders_s: dict[int, float]) -> tuple[float, float]:
        """Until a prefill rank does it for this decode rank, and until it does so itself."""
        key = decode.id.key
        sender_s = senders_s.get(decode.handshake_version, inf) if self.receives(key) else inf
        return sender_s, self.compute_s(key) if Plan.LOCAL in self.plans else inf

    def _senders_s(self, prefills: Orders, enough_s: float) -> dict[int, float]:
        """By handshake version."""
        if Plan.REMOTE not in self.plans:
            return {}
        shortest_s: dict[int, float] = {}
        for order in prefills:
            for rank in islice(order, _SOONEST):
                known_s = shortest_s.get(rank.handshake_version, inf)
                if known_s <= enough_s:
                    break
                shortest_s[rank.handshake_version] = min(known_s, self.compute_s(rank.id.key))
        return shortest_s
