"""The engine core reports these events about its sequences, in order."""

from dataclasses import dataclass

from services.values.errors import IsthmusError
from services.values.kv import PageId
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Room
from services.values.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Wanted:
    """A source is asked for this of a sequence's prompt, in tokens."""

    end: int  # What is behind it is computed in any case.
    expected_end: int  # The source is said to hold as much.
    resumes_at: int  # Without a source the sequence would compute from there on.


@dataclass(frozen=True, slots=True)
class Reserved:
    """The sequence has its pages; `delta_pages` lie past the locked prefix, in token order.

    It is reported when the sequence is admitted for the first time, and again after it was renegotiated.
    Where the sequence receives KV, `carried` has for each group beside full attention, in the layout's order,
    the units that are to take the state at the prompt's end, in token order (tails.units_at many). Where it
    pulls, they are to take the state at the expected end, or the one that it was told since.
    """

    prefix_len: int
    delta_pages: tuple[PageId, ...]
    queue_s: float
    carried: tuple[tuple[PageId, ...], ...] = ()
    wanted: Wanted | None = None  # It waits for a source then.


@dataclass(frozen=True, slots=True)
class Token:
    token_id: int
    logprobs: TokenLogprobs | None
    finished: FinishReason | None
    drafted: int = 0  # Its step verified so many; the last token of the step has them.
    accepted: int = 0  # So many of them are tokens now.
    # Only the first token has these.
    compute_s: float = 0.0  # It lasts from the admission until now.
    reused_tokens: int = 0  # Others had computed them, when it was admitted or since then.
    prompt_logprobs: PromptLogprobs | None = None  # They were requested and computed here.


@dataclass(frozen=True, slots=True)
class Offered:
    """The KV of [start_token, end_token) is final on a prefill rank, in these pages, in token order."""

    room: Room
    start_token: int
    end_token: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """The state at the prompt's end is final on a prefill rank, in these units, by group as in Reserved.

    It is reported once, after the last chunk, where the layout has any. Until the transfer lets go no step
    writes the units, and nobody else is allocated them.
    """

    room: Room
    units: tuple[tuple[PageId, ...], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence is over and holds nothing; in the prefill role its transfer may hold its pages still."""

    error: IsthmusError


Offer = Offered | Carried
Event = Reserved | Token | Offer | Failed
Reported = Event | int  # Most tokens have nothing else to report, and come as their ids.
