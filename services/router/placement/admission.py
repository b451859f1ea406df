"""Admission control: how long a request would wait for its turn, and whether it may. Pure.

It waits for room at the decode rank, and behind the prompts that are computed before its own:

    remote   room(D) + compute(P)        it comes to the prefill rank with its pages in hand
    local    max(room(D), compute(D))    those that wait for room there are among those that will be computed

A cluster that takes in more than it serves makes everybody wait until deadlines end them, and then has worked
for nobody. So who would wait too long is refused at the door, with the time after which it may come again.
"""

from functools import cache
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from services.values.errors import NoCapacity
from services.values.rank import Plan

# Of the time that a request has. The rest is for its prompt and its answer, and for what is foretold wrongly.
_WAIT_SHARE = 0.5
_SOONEST_S = 1.0

_Seconds = NDArray[np.float64]


class Queues(Protocol):
    """The decode ranks' queues: the seconds until each has room and until it computes the next prompt (0
    where its rate is not known), and whether it receives the prefill ranks' KV."""

    queue_wait_s: _Seconds
    compute_wait_s: _Seconds
    receives: NDArray[np.bool_]


class Waits(NamedTuple):
    """How long a request waits for its turn, in seconds; infinite where the plan cannot be."""

    is_local: bool  # whether plan local can be, and
    is_remote: bool  # plan remote

    def local_s(self, decodes: Queues) -> _Seconds:
        if not self.is_local:
            return np.full(len(decodes.queue_wait_s), inf)
        return np.maximum(decodes.queue_wait_s, decodes.compute_wait_s)

    def remote_s(self, decodes: Queues, compute_s: float) -> _Seconds:
        """With a prefill rank that computes it in `compute_s`."""
        if not self.is_remote:
            return np.full(len(decodes.queue_wait_s), inf)
        return np.where(decodes.receives, decodes.queue_wait_s + compute_s, inf)


@cache
def waits_of(plans: frozenset[Plan]) -> Waits:
    """Return the waits where these plans may be chosen."""
    return Waits(Plan.LOCAL in plans, Plan.REMOTE in plans)


def allowed_wait_s(max_wait_s: float, remaining_s: float) -> float:
    """`remaining_s`: until the request's deadline."""
    return min(max_wait_s, _WAIT_SHARE * remaining_s)


def bound_s(max_wait_s: float, decodes: Queues, compute_waits_s: _Seconds) -> float:
    """Return `max_wait_s`, or infinite where no rank or pair of these makes one wait longer, as mostly none
    does: then nobody need look at each. `compute_waits_s` are the prefill ranks'."""
    if max_wait_s == inf:
        return inf
    there_s = (decodes.queue_wait_s + decodes.compute_wait_s).max(initial=0.0)
    return max_wait_s if there_s + compute_waits_s.max(initial=0.0) > max_wait_s else inf


def refusal(wait_s: float, allowed_s: float) -> NoCapacity:
    """Return what to tell a request that would wait `wait_s`, longer than it may."""
    retry_after_s = max(_SOONEST_S, wait_s - allowed_s)
    return NoCapacity(
        f"the cluster is full: the request would wait {wait_s:.1f} s for its turn, {allowed_s:.1f} s at most "
        f"are allowed; try again in {retry_after_s:.0f} s",
        retry_after_s,
    )
