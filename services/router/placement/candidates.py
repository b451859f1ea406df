"""These values say what a request asks for, and how it sees the ranks that it may go to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from services.router.placement.admission import Waits, waits_of
from services.values.kv import BlockHash
from services.values.rank import Plan, RankId, RankKey


@dataclass(frozen=True, slots=True)
class PromptToPlace:
    """This is what the placer is asked: where should this prompt go?"""

    hashes: Sequence[BlockHash]  # They name its full index blocks.
    prompt_tokens: int
    plans: frozenset[Plan]
    pinned: RankKey | None = None  # It is the conversation's decode rank.
    tried: frozenset[RankId] = frozenset()  # These incarnations failed it.
    max_wait_s: float = inf  # It waits no longer for its turn.
    most_tokens: int | None = None  # Prompt and output have no more together; None: nobody says.
    at: RankId | None = None  # No other decode rank may be chosen: it holds the prompt for another answer.
    answers: int = 1  # So many will be requested there.
    reusable_tokens: float = inf  # Who computes it may take no more from a cache.

    @property
    def most_reused(self) -> int:
        """Return the tokens that may be reused: never the last one, whose logits choose the next."""
        return int(min(self.prompt_tokens - 1, self.reusable_tokens))


class DecodeCandidate(NamedTuple):
    """This is a decode rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # A predicted decode_prefix_len under plan remote is worth so much.
    pending_tokens: int  # They are queued or being computed there.
    prefill_tokens_per_s: float
    running: int  # So many sequences run.
    token_s: float  # A sequence gets its next token after so long.
    free_tokens: int  # Free pages have room for them.
    evictable_tokens: int  # They are cached and not locked.
    excluded: str = ""  # This is why it cannot be chosen (draining, failed, ...); empty: it can.
    queued: int = 0  # So many requests' prompts wait to be computed there.
    matched_tokens: int = 0  # The index says so, before trust and predictions.
    waiting_tokens: int = 0  # Requests that wait for pages before this one need so many.
    own: bool = True  # It is of this router's share; see shares.py.
    queue_wait_s: float = 0.0  # It has room for the next request then.
    compute_wait_s: float = 0.0  # It computes the next prompt then; 0 where its rate is not known.
    holds_tokens: float = inf  # One request may have so many, prompt and output together.
    receives: bool = True  # Who does not receive prefill ranks' KV is chosen under plan local alone.
    resume_tokens: int | None = None  # It goes on computing there in the hit; None: at its end.
    matched_resume_tokens: int | None = None  # The index says this of it.
    tokens_per_step: float = 0.0  # A sequence gets so many; 0: not known.

    @property
    def reused_tokens(self) -> int:
        """Return the tokens that it need not compute under plan local."""
        return self.hit_tokens if self.resume_tokens is None else self.resume_tokens

    @property
    def has_room(self) -> bool:
        """Return whether nobody waits for pages there."""
        return self.waiting_tokens <= self.free_tokens + self.evictable_tokens


class PrefillCandidate(NamedTuple):
    """This is a prefill rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # What is held of the prompt is worth so much.
    pending_tokens: int
    prefill_tokens_per_s: float
    free_tokens: int = 0
    evictable_tokens: int = 0
    excluded: str = ""
    queued: int = 0
    matched_tokens: int = 0
    own: bool = True
    compute_wait_s: float = 0.0
    holds_tokens: float = inf  # One prompt may have so many.
    resume_tokens: int | None = None  # This is a predicted prefill_prefix_len; None: the hit.
    matched_resume_tokens: int | None = None

    @property
    def reused_tokens(self) -> int:
        """Return the tokens that it need not compute."""
        return self.hit_tokens if self.resume_tokens is None else self.resume_tokens


Candidate = DecodeCandidate | PrefillCandidate


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    prompt_tokens: int
    kv_bytes_per_token: float
    chunk_tokens: int  # Prefill computes, and sends, so many at a time.
    pinned: RankKey | None = None  # It is the conversation's decode rank.
    plans: frozenset[Plan] = frozenset(Plan)
    max_wait_s: float = inf  # It waits no longer for its turn.
    # Prompt and output have no more together; None: nobody says, or no rank holds so many.
    most_tokens: int | None = None
    longest_tokens: float = 0  # The roomiest decode rank holds so many of one request.
    carried_bytes: float = 0.0  # Tails and states cross, whatever decode holds.

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.chunk_tokens < 1 or not self.plans:
            raise ValueError(f"a prompt, a chunk and a plan are needed to place a request: {self}")

    @property
    def waits(self) -> Waits:
        return waits_of(self.plans)
