"""May this rank be chosen for a request? The reason where it may not. Pure.

    of_rank          what the rank itself tells: it failed this request, drains, is not connected, holds too
                     little, is not live, has another KV layout
    beside_others    what the others add: another one could hold all of it, or the request would wait too long
                     here whichever rank it is paired with

An empty reason is none. Nothing else excludes a rank. Of a thousand ranks most may be chosen, so RankTable
knows by columns which of them of_rank lets through; of_rank has the words.
"""

from math import inf
from typing import NamedTuple

import numpy as np

from services.router.placement.candidates import PlacementRequest, PromptToPlace
from services.router.placement.sides import Numbers, Side
from services.router.ranks.balance import Liveness
from services.values.rank import Plan, Role
from services.values.registration import Registration

TOO_SMALL = "prompt and max_tokens do not fit its pool"
TOO_LONG = "its queue is too long"


class Standing(NamedTuple):
    """What a router knows of a rank, of all that can exclude it."""

    liveness: Liveness
    is_connected: bool  # the stream to a decode rank
    differs_in: str = ""  # its KV layout from the one that plan remote goes by


def of_rank(rank: Registration, standing: Standing, asked: PromptToPlace) -> str:
    """Return the reason; a lapsed lease alone is none.

    A decode rank whose stream is up is alive, and a prefill rank is left alone for a while if it fails, and
    until it speaks if it is silent.
    """
    is_decode = rank.role is Role.DECODE
    if asked.tried and rank.id in asked.tried:
        return "it failed this request"
    if rank.draining:
        return "draining"
    if is_decode and not standing.is_connected:
        return "not connected"
    # A decode rank needs room for one more token.
    if asked.prompt_tokens > rank.max_context_tokens - is_decode:
        return "the prompt is longer than its context"
    if standing.liveness:
        return standing.liveness.value
    if standing.differs_in and not (is_decode and Plan.LOCAL in asked.plans):
        return f"its KV layout differs from that of most ranks in {standing.differs_in}"
    return ""


def beside_others(request: PlacementRequest, decodes: Side, prefills: Side) -> None:
    """Close the rows that the others rule out."""
    if request.max_wait_s < inf:
        for side, waits_s in zip((decodes, prefills), _waits_s(request, decodes, prefills), strict=True):
            side.close((request.max_wait_s < waits_s) & (waits_s < inf), TOO_LONG)
    # What outgrows its rank goes on at a larger one, but its KV is computed there once more. So who cannot
    # hold all that was asked for is excluded as long as somebody else can. Where nobody can, or nobody has
    # said how long the answer may be, the move is priced by how likely it is (price.py, `outgrow`).
    if request.most_tokens is not None:
        too_small = decodes.holds < request.most_tokens
        if (decodes.is_open & ~too_small).any():
            decodes.close(too_small, TOO_SMALL)


def shortest_wait_s(request: PlacementRequest, decodes: Side, prefills: Side) -> float:
    """Return where the request would wait least of all ranks that may be chosen; infinite: there is none."""
    waits_s, _ = _waits_s(request, decodes, prefills)
    return float(waits_s[decodes.is_open].min(initial=inf))


def _waits_s(request: PlacementRequest, decodes: Side, prefills: Side) -> tuple[Numbers, Numbers]:
    """Return each rank's wait beside the rank of the other role that adds least to it."""
    waits = request.waits
    compute_s = float(prefills.compute_wait_s[prefills.is_open].min(initial=inf))
    room_s = float(decodes.queue_wait_s[decodes.is_open & decodes.receives].min(initial=inf))
    at_decodes_s = np.minimum(waits.local_s(decodes), waits.remote_s(decodes, compute_s))
    at_prefills_s = room_s + prefills.compute_wait_s if waits.is_remote else np.full(len(prefills), inf)
    return at_decodes_s, at_prefills_s
