"""These values say what a request asks for, and how it sees the ranks that it may go to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from services.router.placement.admission import Waits, waits_of
from services.values.kv import BlockHash
from services.values.rank import Plan, RankId, RankKey


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to be placed."""

    hashes: Sequence[BlockHash]  # of its full index blocks
    prompt_tokens: int
    plans: frozenset[Plan]
    pinned: RankKey | None = None  # the conversation's decode rank
    tried: frozenset[RankId] = frozenset()  # lives that failed it
    max_wait_s: float = inf  # for its turn
    most_tokens: int | None = None  # prompt and output together; None: nobody says
    must_hold: int = 0  # tokens of it, for a decode rank to be chosen
    at: RankId | None = None  # the one decode rank that may be chosen: it holds the prompt for another answer
    answers: int = 1  # that will be asked for there
    reusable_tokens: float = inf  # of it, that who computes it may take from a cache

    @property
    def most_reused(self) -> int:
        """Return the tokens that may be reused: never the last one, whose logits choose the next."""
        return int(min(self.prompt_tokens - 1, self.reusable_tokens))


class DecodeCandidate(NamedTuple):
    """This is a decode rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # what a predicted decode_prefix_len under plan remote is worth
    pending_tokens: int  # queued or being computed there
    prefill_tokens_per_s: float
    running: int  # sequences
    token_s: float  # between two tokens of a sequence
    free_tokens: int  # room in free pages
    evictable_tokens: int  # cached, unlocked
    excluded: str = ""  # why it cannot be chosen (draining, failed, ...); empty: it can
    queued: int = 0  # requests whose prompts wait to be computed there
    matched_tokens: int = 0  # what the index says, before trust and predictions
    waiting_tokens: int = 0  # of requests that wait for pages before this one
    own: bool = True  # of this router's share; see rank_order.py
    queue_wait_s: float = 0.0  # until it has room for the next request
    compute_wait_s: float = 0.0  # until it computes the next prompt; 0 where its rate is not known
    holds_tokens: float = inf  # of one request, prompt and output together
    receives: bool = True  # the prefill ranks' KV; who does not can be chosen under plan local alone
    resume_tokens: int | None = None  # of the hit, from where it goes on computing; None: the hit's end
    matched_resume_tokens: int | None = None  # likewise, of what the index says
    tokens_per_step: float = 0.0  # that a sequence gets; 0: not known

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
    hit_tokens: int  # what is held of the prompt is worth
    pending_tokens: int
    prefill_tokens_per_s: float
    free_tokens: int = 0
    evictable_tokens: int = 0
    excluded: str = ""
    queued: int = 0
    matched_tokens: int = 0
    own: bool = True
    compute_wait_s: float = 0.0
    holds_tokens: float = inf  # of one prompt
    resume_tokens: int | None = None  # a predicted prefill_prefix_len; None: the hit
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
    chunk_tokens: int  # prefill computes, and sends, so many tokens at a time
    pinned: RankKey | None = None  # the conversation's decode rank
    plans: frozenset[Plan] = frozenset(Plan)
    max_wait_s: float = inf  # for its turn
    most_tokens: int | None = None  # prompt and output together; None: nobody says, or no rank holds so many
    longest_tokens: float = 0  # that the roomiest decode rank holds of one request
    carried_bytes: float = 0.0  # tails and states at its end, that cross whatever decode holds

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.chunk_tokens < 1 or not self.plans:
            raise ValueError(f"a prompt, a chunk and a plan are needed to place a request: {self}")

    @property
    def waits(self) -> Waits:
        return waits_of(self.plans)
