"""Where a request would wait for its turn longer than it may. Pure.

It waits for room at the decode rank, then behind the prompts that are computed before its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeVar

from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.values.rank import Plan

_Rank = TypeVar("_Rank", DecodeCandidate, PrefillCandidate)

_TOO_LONG = "its queue is too long"


def local_wait_s(decode: DecodeCandidate) -> float:
    """Those that wait for room there are among those that will be computed."""
    return max(decode.queue_wait_s, decode.compute_wait_s)


def remote_wait_s(decode: DecodeCandidate, prefill: PrefillCandidate) -> float:
    return decode.queue_wait_s + prefill.compute_wait_s


def shortest_wait_s(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> float:
    """At any rank that is not excluded; infinite where there is none."""
    beside = _beside(request, decodes, prefills)
    return min((_at_decode(d, request, beside) for d in decodes if not d.excluded), default=inf)


def pass_over(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> tuple[Sequence[DecodeCandidate], Sequence[PrefillCandidate]]:
    """The same, with those excluded where the request would wait too long whatever the other rank."""
    beside = _beside(request, decodes, prefills)
    return (
        [_judged(decode, _at_decode(decode, request, beside), request) for decode in decodes],
        [_judged(prefill, _at_prefill(prefill, beside), request) for prefill in prefills],
    )


class _Beside(NamedTuple):
    """The shortest waits that another rank can add under plan remote, in seconds; infinite: there is none."""

    queue_s: float
    compute_s: float


def _beside(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> _Beside:
    if Plan.REMOTE not in request.plans:
        return _Beside(inf, inf)
    return _Beside(
        min((d.queue_wait_s for d in decodes if d.receives and not d.excluded), default=inf),
        min((p.compute_wait_s for p in prefills if not p.excluded), default=inf),
    )


def _at_decode(decode: DecodeCandidate, request: PlacementRequest, beside: _Beside) -> float:
    local_s = local_wait_s(decode) if Plan.LOCAL in request.plans else inf
    compute_s = beside.compute_s if decode.receives else inf
    return min(local_s, decode.queue_wait_s + compute_s)


def _at_prefill(prefill: PrefillCandidate, beside: _Beside) -> float:
    return beside.queue_s + prefill.compute_wait_s


def _judged(rank: _Rank, wait_s: float, request: PlacementRequest) -> _Rank:
    too_long = not rank.excluded and request.max_wait_s < wait_s < inf
    return replace(rank, excluded=_TOO_LONG) if too_long else rank
