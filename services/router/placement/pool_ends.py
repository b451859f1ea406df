"""Decode ranks whose pools end before a request may. Pure.

What outgrows its rank goes on at a larger one, but its KV is computed there once more. So who cannot hold all
that was asked for is left out as long as somebody can. Where nobody can, or nobody has said how long the
answer may be, the move is priced by how likely it is (price.py, `outgrow`).
"""

from collections.abc import Sequence
from dataclasses import replace

from services.router.placement.candidates import DecodeCandidate, PlacementRequest
from services.values.request import FinishReason

TOO_SMALL = "prompt and max_tokens do not fit its pool"


def holding_all(request: PlacementRequest, decodes: Sequence[DecodeCandidate]) -> Sequence[DecodeCandidate]:
    """The same, with those excluded that cannot hold all of the request, if one that can may be chosen."""
    most = request.most_tokens
    if most is None or not any(_holds(decode, most) for decode in decodes if not decode.excluded):
        return decodes
    return [
        decode if decode.excluded or _holds(decode, most) else replace(decode, excluded=TOO_SMALL)
        for decode in decodes
    ]


def _holds(decode: DecodeCandidate, num_tokens: int) -> bool:
    return decode.holds_tokens >= num_tokens


def length_means(
    *, num_tokens: int, output_tokens: int, max_tokens: int | None, model_tokens: int, longest_tokens: int
) -> FinishReason | None:
    """What it is for the client that a decode rank ended its request with LENGTH; None: nothing, for another
    rank holds more. `num_tokens` are the prompt's and the output's together, `longest_tokens` what the
    roomiest rank holds, `model_tokens` the model's context."""
    if num_tokens >= model_tokens or (max_tokens is not None and output_tokens >= max_tokens):
        return FinishReason.LENGTH
    return FinishReason.CAPACITY if num_tokens >= longest_tokens else None
