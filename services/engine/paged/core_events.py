"""The engine core reports these events about its sequences, in order."""

from dataclasses import dataclass
from typing import NamedTuple

from services.values.errors import IsthmusError
from services.values.kv import PageId
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import TransferId
from services.values.request import FinishReason, Pulled, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Wanted:
    """It tells, in tokens, what a source is asked for of a sequence's prompt."""

    end: int  # The tokens behind it are computed in any case.
    expected_end: int  # The source is said to hold so many tokens.
    resumes_at: int  # Without a source the sequence would compute from here on.


@dataclass(frozen=True, slots=True)
class Reserved:
    """The sequence has its pages; `delta_pages` follow the locked prefix, in token order.

    It is reported when the sequence is first admitted, and again after a renegotiation. With `fills` a tier
    writes the pages, and nobody else may: it is reported once more when they may. Where the sequence
    receives KV, `carried` has an entry for each group beside full attention, in the layout's order: the units
    that are to take the state at the prompt's end, in token order (tails.units_at tells how many). Where the
    sequence pulls, they are to take the state at the expected end, or at the end that was reported since.
    """

    prefix_len: int
    delta_pages: tuple[PageId, ...]
    carried: tuple[tuple[PageId, ...], ...] = ()
    wanted: Wanted | None = None  # It is set where the sequence waits for a source.
    fills: bool = False


class PromptTime(NamedTuple):
    """The time from a sequence's submission to its first token has three parts, in seconds."""

    queued_s: float = 0.0  # It waited for pages or a slot in the batch, again after each retraction.
    waited_s: float = 0.0  # It had its pages: others were computed first, or a source or a tier wrote.
    computed_s: float = 0.0  # It counts from the start of the step with the first chunk of the prompt.
    rank_tokens: int = 0  # The rank computed so many prompt tokens in all this time, of all sequences.

    def unpulled_s(self, pulled: Pulled | None) -> float:
        """Return `waited_s` without the time of the pull, which is told apart."""
        return self.waited_s if pulled is None else max(0.0, self.waited_s - pulled.seconds)


NO_TIME = PromptTime()


@dataclass(frozen=True, slots=True)
class Token:
    token_id: int
    logprobs: TokenLogprobs | None
    finished: FinishReason | None
    drafted: int = 0  # The step verified so many drafts; they are reported with its last token.
    accepted: int = 0  # So many of these drafts are tokens now.
    # Only the first token has the following values.
    time: PromptTime = NO_TIME
    reused_tokens: int = 0  # Others had computed these, at the admission or since.
    # It is set where the log-probabilities were requested and computed here.
    prompt_logprobs: PromptLogprobs | None = None
    brought_tokens: int = 0  # Of the reused ones, these came from a tier.
    draft_tokens: int | None = None  # On a prefill rank with a draft model, these have its KV, too.


@dataclass(frozen=True, slots=True)
class Offered:
    """The KV of [start_token, end_token) is final on a prefill rank, in these pages, in token order."""

    transfer_id: TransferId
    start_token: int
    end_token: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """The state at the prompt's end is final on a prefill rank, in these units, by group as in Reserved.

    It is reported once, after the last chunk, where the layout has such a state. Until the transfer has ended
    no step writes the units, and nobody else gets them.
    """

    transfer_id: TransferId
    units: tuple[tuple[PageId, ...], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence has ended and holds nothing; in the prefill role its transfer may still hold its pages."""

    error: IsthmusError


Offer = Offered | Carried
Event = Reserved | Token | Offer | Failed
Reported = Event | int  # Most tokens have nothing else to report, and are reported as their ids.
