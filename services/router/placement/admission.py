"""Admission control: how long a request would wait for its turn, and whether it may. Pure.

It waits for room at the decode rank, and behind the prompts that are computed before its own:

    remote   room(D) + compute(P)        it comes to the prefill rank with its pages in hand
    local    max(room(D), compute(D))    those that wait for room there are among those that will be computed

A cluster that takes in more than it serves makes everybody wait until deadlines end them, and then has worked
for nobody. So who would wait too long is refused at the door, with the time after which it may come again.
"""

from collections.abc import Iterable
from functools import cache
from math import inf
from typing import NamedTuple, Protocol

from services.values.errors import NoCapacity
from services.values.rank import Plan

# A request may wait for so much of its time. The rest is for its prompt, its answer and wrong predictions.
_WAIT_SHARE = 0.5
_SOONEST_S = 1.0
_LOOKED_AT = 64  # of a role, when what is wanted is any rank in time


class Computing(Protocol):
    """A rank that computes prompts, as the next one sees it."""

    @property
    def compute_wait_s(self) -> float:
        """Return the seconds until it computes the prompt, or 0 where its rate is not known."""


class Receiving(Computing, Protocol):
    """A decode rank."""

    @property
    def queue_wait_s(self) -> float:
        """Return the seconds until it has room."""

    @property
    def receives(self) -> bool:
        """The prefill ranks' KV."""


class Waits(NamedTuple):
    """These are a request's waits for its turn, in seconds; infinite where the plan cannot be."""

    is_local: bool  # This says whether plan local can be,
    is_remote: bool  # and this whether plan remote can.

    def local_s(self, decode: Receiving) -> float:
        return max(decode.queue_wait_s, decode.compute_wait_s) if self.is_local else inf

    def remote_s(self, decode: Receiving, compute_s: float) -> float:
        """Return the wait with a prefill rank that computes the prompt in `compute_s`."""
        return decode.queue_wait_s + compute_s if self.is_remote and decode.receives else inf

    def shortest_s(self, decode: Receiving, compute_s: float) -> float:
        """Return the shortest wait at this decode rank; `compute_s` is as above, of the prefill rank that is
        soonest."""
        return min(self.local_s(decode), self.remote_s(decode, compute_s))

    def about_s(self, decodes: Iterable[Receiving], prefills: Iterable[Computing], enough_s: float) -> float:
        """Return the wait at the best of the ranks, told by looking at few; it is infinite where there is
        nowhere to go. It is 0 as soon as a rank is found, or each of a pair, with a wait of `enough_s` or
        less. Many ranks come in the order of load: if the first ones do not compute in time, neither do the
        others, unless they lack room. When a decode rank has room is in no order."""
        compute_s = self._soonest_s(prefills, enough_s)
        shortest_s, looked_at = inf, 0
        for decode in decodes:
            room_s = decode.queue_wait_s
            if room_s >= shortest_s:
                continue
            local_s, theirs_s = self.local_s(decode), compute_s if decode.receives else inf
            if min(local_s, max(room_s, theirs_s)) <= enough_s:
                return 0.0
            shortest_s = min(shortest_s, local_s, self.remote_s(decode, compute_s))
            looked_at += room_s <= enough_s
            if looked_at == _LOOKED_AT and compute_s > enough_s:
                break
        return shortest_s

    def _soonest_s(self, prefills: Iterable[Computing], enough_s: float) -> float:
        soonest_s = inf
        if self.is_remote:
            for prefill, _ in zip(prefills, range(_LOOKED_AT), strict=False):
                soonest_s = min(soonest_s, prefill.compute_wait_s)
                if soonest_s <= enough_s:
                    break
        return soonest_s


@cache
def waits_of(plans: frozenset[Plan]) -> Waits:
    """Return the waits by the plans that may be chosen."""
    return Waits(Plan.LOCAL in plans, Plan.REMOTE in plans)


def allowed_wait_s(max_wait_s: float, remaining_s: float) -> float:
    """Return the seconds that a request may wait whose deadline is in `remaining_s`."""
    return min(max_wait_s, _WAIT_SHARE * remaining_s)


def bound_s(max_wait_s: float, decodes: Iterable[Receiving], prefills: Iterable[Computing]) -> float:
    """`max_wait_s`, or infinite where no rank or pair of these makes one wait longer, as mostly none does:
    then nobody need look at each."""
    if max_wait_s == inf:
        return inf
    there_s = max((decode.queue_wait_s + decode.compute_wait_s for decode in decodes), default=0.0)
    before_s = max((prefill.compute_wait_s for prefill in prefills), default=0.0)
    return max_wait_s if there_s + before_s > max_wait_s else inf


def refusal(wait_s: float, allowed_s: float) -> NoCapacity:
    """Return what to tell a request that would wait `wait_s`, longer than it may."""
    retry_after_s = max(_SOONEST_S, wait_s - allowed_s)
    return NoCapacity(
        f"the cluster is full: the request would wait {wait_s:.1f} s for its turn, {allowed_s:.1f} s at most "
        f"are allowed; try again in {retry_after_s:.0f} s",
        retry_after_s,
    )
