"""What the engine core says of its sequences, in order."""

from dataclasses import dataclass

from services.values.kv import PageId
from services.values.rank import Room
from services.values.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reserved:
    """The sequence has its pages; `delta_pages` lie past the locked prefix, in token order.

    Said when it is admitted for the first time, and again after it was renegotiated.
    """

    prefix_len: int
    delta_pages: tuple[PageId, ...]
    queue_s: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `finished` when it is the last."""

    token_id: int
    logprobs: TokenLogprobs | None
    finished: FinishReason | None
    # On the first token only:
    compute_s: float = 0.0  # admission until now
    reused_tokens: int = 0  # of the prompt, computed by others: when it was admitted, or since then


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefill role: the KV of [start_token, end_token) is final, in these pages, in token order."""

    room: Room
    start_token: int
    end_token: int
    pages: tuple[PageId, ...]


Event = Reserved | Token | Offered
