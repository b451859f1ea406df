"""These functions tell why a rank may not be chosen for a request. Pure.

    of_rank          judges the rank alone: it failed this request, drains, has not loaded the adapter, is
                     not connected, holds too little, is not live, or has another KV layout
    beside_others    compares it with the others: another rank could hold the whole request, or the request
                     would wait too long here whichever rank it is paired with

An empty reason means that the rank may be chosen. Nothing else excludes a rank.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, TypeVar

from services.router.placement.candidates import Asked, DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.ranks.balance import Liveness
from services.values.rank import Plan, Role
from services.values.rank_reports import Registration

TOO_SMALL = "prompt and max_tokens do not fit its pool"
TOO_LONG = "its queue is too long"

_Candidate = TypeVar("_Candidate", DecodeCandidate, PrefillCandidate)


class Standing(NamedTuple):
    liveness: Liveness
    is_connected: bool  # whether the stream to a decode rank is up
    differs_in: str = ""  # in what its KV layout differs from the one that plan remote uses


WELL = Standing(Liveness.LIVE, is_connected=True)


def of_rank(rank: Registration, standing: Standing, asked: Asked) -> str:
    """Return why the rank cannot be chosen, judged alone, or an empty text.

    A lapsed lease alone is no reason. A decode rank whose stream is up is alive. A prefill rank that fails is
    not chosen for a while, and one that is silent is not chosen until it reports again.
    """
    is_decode = rank.role is Role.DECODE
    if asked.tried and rank.id in asked.tried:
        return "it failed this request"
    if rank.draining:
        return "draining"
    if asked.adapter is not None and asked.adapter not in rank.adapters:
        return f"it has not loaded {asked.adapter}"
    if is_decode and not standing.is_connected:
        return "not connected"
    # A decode rank needs room for one more token.
    if asked.prompt_tokens > rank.max_context_tokens - is_decode:
        return "the prompt is longer than its context"
    if standing.liveness:
        return standing.liveness.value
    if standing.differs_in and not (is_decode and Plan.LOCAL in asked.plans):
        return f"its KV layout differs from that of most ranks in {standing.differs_in}"
    return TOO_SMALL if is_decode and rank.max_context_tokens < asked.must_hold else ""


def beside_others(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> tuple[Sequence[DecodeCandidate], Sequence[PrefillCandidate]]:
    if request.max_wait_s < inf:
        decodes, prefills = _in_time(request, decodes, prefills)
    return _holding_all(request, decodes), prefills


def shortest_wait_s(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> float:
    compute_s = _soonest_s(prefills)
    waits = (request.waits.shortest_s(decode, compute_s) for decode in decodes if not decode.excluded)
    return min(waits, default=inf)


def _in_time(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> tuple[Sequence[DecodeCandidate], Sequence[PrefillCandidate]]:
    """Judge each rank by its wait together with the best rank of the other role."""
    waits, compute_s = request.waits, _soonest_s(prefills)
    receiving = [decode for decode in decodes if decode.receives and not decode.excluded]
    roomiest = min(receiving, key=lambda decode: decode.queue_wait_s, default=None)

    def at_prefill_s(prefill: PrefillCandidate) -> float:
        return inf if roomiest is None else waits.remote_s(roomiest, prefill.compute_wait_s)

    def judged(rank: _Candidate, wait_s: float) -> _Candidate:
        is_too_long = not rank.excluded and request.max_wait_s < wait_s < inf
        return rank._replace(excluded=TOO_LONG) if is_too_long else rank

    return (
        [judged(decode, waits.shortest_s(decode, compute_s)) for decode in decodes],
        [judged(prefill, at_prefill_s(prefill)) for prefill in prefills],
    )


def _soonest_s(prefills: Sequence[PrefillCandidate]) -> float:
    return min((prefill.compute_wait_s for prefill in prefills if not prefill.excluded), default=inf)


def _holding_all(request: PlacementRequest, decodes: Sequence[DecodeCandidate]) -> Sequence[DecodeCandidate]:
    """Exclude ranks that cannot hold the whole request, as long as another one can.

    A request that outgrows its rank goes on at a larger one, but its KV must be computed there again. Where
    no rank can hold it all, or the length of the answer has no limit, the price includes that move by its
    probability (price.py, `outgrow`).
    """
    most = request.most_tokens
    if most is None or not any(decode.holds_tokens >= most for decode in decodes if not decode.excluded):
        return decodes
    return [
        decode if decode.excluded or decode.holds_tokens >= most else decode._replace(excluded=TOO_SMALL)
        for decode in decodes
    ]
