"""What the engine core says of its sequences, in order."""

from dataclasses import dataclass

from services.values.errors import IsthmusError
from services.values.kv import PageId
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Room
from services.values.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reserved:
    """The sequence has its pages; `delta_pages` lie past the locked prefix, in token order.

    Said when it is admitted for the first time, and again after it was renegotiated. Where it receives KV,
    `carried` has for each group beside full attention, in the layout's order, the units that are to take
    what is carried at the prompt's end, in token order (tails.units_at many).
    """

    prefix_len: int
    delta_pages: tuple[PageId, ...]
    queue_s: float
    carried: tuple[tuple[PageId, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `finished` when it is the last."""

    token_id: int
    logprobs: TokenLogprobs | None
    finished: FinishReason | None
    drafted: int = 0  # ids that its step verified; on the last token of the step
    accepted: int = 0  # of them, those that are tokens now
    # On the first token only:
    compute_s: float = 0.0  # admission until now
    reused_tokens: int = 0  # of the prompt, computed by others: when it was admitted, or since then
    prompt_logprobs: PromptLogprobs | None = None  # where they were asked for and computed here


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefill role: the KV of [start_token, end_token) is final, in these pages, in token order."""

    room: Room
    start_token: int
    end_token: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """Prefill role: what is carried at the prompt's end is final, in these units, by group as in Reserved.

    Said once, after the last chunk, where the layout carries anything. Until the room lets go no step
    writes the units, and nobody else is lent them.
    """

    room: Room
    units: tuple[tuple[PageId, ...], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over and holds nothing; in the prefill role its room may hold its pages still."""

    error: IsthmusError


Offer = Offered | Carried
Event = Reserved | Token | Offer | Failed
Said = Event | int  # the id of a generated token of which there is nothing else to tell: most are such
