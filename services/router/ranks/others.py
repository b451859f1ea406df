"""What other routers have probably sent by now, before the ranks' reports tell of it. Pure.

Requests come in bursts, to all routers alike. So each of the others has probably sent as much to every rank
of its share as this one to those of its own, as far as it has as much to send; shares.py says whose is which.
"""

from collections import deque
from collections.abc import Container
from typing import NamedTuple

from services.values.rank import RankKey

LATELY_S = 0.1  # then the ranks' reports tell of it
# A router that gets (nearly) all requests, though there are others, places like one that is alone.
_HALF_LIFE_S = 30.0
_NEARLY_NONE = 0.1
_MOST_A_LOOK_S = 1.0  # that one look stands for: what was before, in a pause, it does not tell


class _Sent(NamedTuple):
    sent_s: float
    rank: RankKey
    tokens: int  # to be computed there


class Lately:
    """What this router sent within the last LATELY_S. `now` never goes back."""

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()

    def sent(self, rank: RankKey, tokens: int, now: float) -> None:
        self._sent.append(_Sent(now, rank, tokens))

    def tokens(self, ranks: Container[RankKey], now: float) -> int:
        """Sent to these, in all."""
        while self._sent and self._sent[0].sent_s <= now - LATELY_S:
            self._sent.popleft()
        return sum(sent.tokens for sent in self._sent if sent.rank in ranks)


class Requests(NamedTuple):
    """At a decode rank, as it counted them: of all routers, and of the one that it tells."""

    all: int = 0
    own: int = 0


NOBODY = Requests()


class Reported:
    """The sum of what the decode ranks counted."""

    def __init__(self) -> None:
        self.requests = 0
        self.own = 0
        self._by_rank: dict[RankKey, Requests] = {}

    def update(self, rank: RankKey, counted: Requests) -> None:
        before = self._by_rank.get(rank, NOBODY)
        self.requests += counted.all - before.all
        self.own += counted.own - before.own
        self._by_rank[rank] = counted


def traffic(reported: int, own: int, routers: int) -> float:
    """Each other router's, as a part of this one's, whose are `own` of the `reported` requests; 1 at most."""
    return min(1.0, max(0, reported - own) / (max(1, own) * (routers - 1)))


class Presence:
    """Whether the others send anything to speak of, of late. They are taken to, until it is known."""

    def __init__(self) -> None:
        self._traffic = 1.0
        self._told_s: float | None = None

    @property
    def alone(self) -> bool:
        return self._traffic < _NEARLY_NONE

    def note(self, traffic: float, now: float) -> None:
        """`traffic` as above, while ranks report requests at all. `now` never goes back."""
        passed_s = 0.0 if self._told_s is None else min(now - self._told_s, _MOST_A_LOOK_S)
        kept = 0.5 ** (passed_s / _HALF_LIFE_S)
        self._traffic = kept * self._traffic + (1 - kept) * traffic
        self._told_s = now
