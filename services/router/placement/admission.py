"""How long a request may be expected to wait and still be let in. Pure.

A cluster that takes in more than it serves makes everybody wait until deadlines end them, and then has worked
for nobody. So who would wait too long is refused at the door, with the time after which it may come again.
"""

from services.values.errors import NoCapacity

# Of the time that a request has. The rest is for its prompt and its answer, and for what is foretold wrongly.
_WAIT_SHARE = 0.5
_SOONEST_S = 1.0


def allowed_wait_s(max_wait_s: float, remaining_s: float) -> float:
    """`remaining_s`: until the request's deadline."""
    return min(max_wait_s, _WAIT_SHARE * remaining_s)


def refusal(wait_s: float, allowed_s: float) -> NoCapacity:
    """What to tell a request that would wait `wait_s`, longer than it may."""
    retry_after_s = max(_SOONEST_S, wait_s - allowed_s)
    return NoCapacity(
        f"the cluster is full: the request would wait {wait_s:.1f} s for its turn, {allowed_s:.1f} s at most "
        f"are allowed; try again in {retry_after_s:.0f} s",
        retry_after_s,
    )
