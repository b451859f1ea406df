"""The requests that are replayed have index blocks in place of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.values.request import Pulled

if TYPE_CHECKING:
    from services.router.replay.ranks import DecodeRank, PrefillRank, Rank

BLOCK_TOKENS = 512  # of the trace and of made-up requests


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks` are ids of blocks of Timing.block_tokens; the last one of a trace may be partly filled, and
    counts as a whole one, as in the trace's own figures. A generated request has its full blocks alone.

    It is sent at `arrival_s`, or `wait_s` after the requests whose numbers are in `after` have ended.
    """

    number: int
    arrival_s: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    session: str
    after: tuple[int, ...] = ()
    wait_s: float = 0.0
    answered: tuple[int, ...] = ()  # the full blocks of prompt and answer; none: nobody asks for them again
    new_tokens: int = 0  # of the prompt, behind what its session has said or what sessions share
    client: int = 0  # whose session it is
    common_blocks: int = -1  # the prompt's with others, where it is known that they have common tokens more
    common_tokens: int = 0  # those more: less than a block

    def num_pages(self, block_tokens: int) -> int:
        """Return the pages of the prompt."""
        return max(len(self.blocks), -(-self.prompt_tokens // block_tokens))

    def num_common(self, other: "TraceRequest") -> int:
        """Return how many of the first blocks both have. A block stands for all that comes before it, too."""
        low, high = 0, min(len(self.blocks), len(other.blocks))
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks[middle - 1] == other.blocks[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def found_tokens(self, blocks: int, block_tokens: int) -> int:
        """Return the tokens that are found where so many blocks are."""
        return blocks * block_tokens + (self.common_tokens if blocks == self.common_blocks else 0)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through two ranks."""

    request: TraceRequest
    decode: "DecodeRank"
    prefill: "PrefillRank | None"
    on_first_token: "Callable[[Job], None]"
    on_end: "Callable[[Job], None]"
    pending_tokens: int = 0  # as the rank counts them
    bringer: "Job | None" = None  # It has most in common with this one of those that came before.
    came_tokens: int = 0  # These were to be computed of prompts when it came, its own included.
    rank_tokens: int = 0  # as Admitted has them
    done_tokens: int = -1  # those computed, and those found; -1 before it begins
    common_tokens: int = 0  # of these, that prompts before it bring
    decode_blocks: int = 0  # matched
    resumed_blocks: int = 0  # not computed by who computes
    brought_blocks: int = 0  # of these, read from its tier
    pulled_blocks: int = 0  # of these, written by its source
    source: "Rank | None" = None
    source_blocks: int = 0  # that the source is to hold
    pulled: Pulled | None = None  # what came of that
    borders: Sequence[int] = ()  # where that one keeps states
    computed_tokens: int = 0
    delta_tokens: int = 0
    queued_s: float = 0.0
    decode_queue_s: float = 0.0  # until it had the pages to receive into
    prefill_queue_s: float = 0.0  # until its first chunk, but for the pull
    began_s: float = 0.0  # that chunk
    computed_s: float = 0.0
    transfer_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0

    @property
    def has_begun(self) -> bool:
        return self.done_tokens >= 0

    @property
    def left_tokens(self) -> int:
        return self.request.prompt_tokens - self.done_tokens

    @property
    def own_tokens(self) -> int:
        """Return the tokens that are to be computed of it, and that no prompt brings that came before."""
        return self.left_tokens if self.has_begun else self.pending_tokens - self.common_tokens

    @property
    def awaits_bringer(self) -> bool:
        """Return whether the other one has yet to compute what it brings."""
        if not self.common_tokens or self.bringer is None or self.bringer.computed_s:
            return False
        return self.bringer.done_tokens < self.request.prompt_tokens - self.own_tokens
