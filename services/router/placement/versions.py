"""Who can be paired with whom while ranks are upgraded one after another. Pure.

Ranks of different handshake versions refuse each other at Hello: under plan remote they are never paired.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TypeVar

from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.values.rank import Plan

_Rank = TypeVar("_Rank", DecodeCandidate, PrefillCandidate)


def able_to_pair(
    request: PlacementRequest, decodes: Sequence[DecodeCandidate], prefills: Sequence[PrefillCandidate]
) -> tuple[Sequence[DecodeCandidate], Sequence[PrefillCandidate]]:
    """The same, with those excluded for whom the other role has nobody of their handshake version.

    A decode rank that may compute the prompt itself is not.
    """
    heard = {rank.handshake_version for rank in decodes if rank.receives and not rank.excluded}
    spoken = {rank.handshake_version for rank in prefills if not rank.excluded}
    if heard == spoken or not (heard and spoken):
        return decodes, prefills
    if Plan.LOCAL not in request.plans:
        decodes = [_speaking(rank, spoken, "prefill") for rank in decodes]
    return decodes, [_speaking(rank, heard, "decode") for rank in prefills]


def _speaking(rank: _Rank, versions: Container[int], peer: str) -> _Rank:
    if rank.excluded or rank.handshake_version in versions:
        return rank
    reason = f"no {peer} rank speaks its handshake version {rank.handshake_version}"
    return replace(rank, excluded=reason)
