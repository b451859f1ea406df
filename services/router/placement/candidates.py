"""These values describe a request and the ranks as it sees them, and tell how long it would wait there. Pure.

A request waits for free pages at the decode rank (`room`), and for the prompts that are computed before its
own:

    remote   room(D) + compute(P)        it reaches the prefill rank when its pages at D are allocated
    local    max(room(D), compute(D))    compute(D) counts the prompts that wait for pages at D, too

If a cluster accepts more than it can serve, all requests wait until their deadlines end them, and the work is
lost. So admission control refuses a request that would wait too long, and says after which time the client
may try again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple, Protocol

from services.values.adapter import Adapter
from services.values.errors import NoCapacity
from services.values.kv import BlockHash
from services.values.rank import Plan, RankId, RankKey

# A request may wait for this share of its time. The rest is for its prompt, its answer and wrong predictions.
_WAIT_SHARE = 0.5
_SOONEST_S = 1.0
_LOOKED_AT = 64  # So many ranks of a role are checked when any rank that is in time will do.


class Computing(Protocol):
    @property
    def compute_wait_s(self) -> float:
        """Return the seconds until it computes the prompt, or 0 where its rate is not known."""


class Receiving(Computing, Protocol):
    @property
    def queue_wait_s(self) -> float:
        """Return the seconds until it has pages for the request."""

    @property
    def receives(self) -> bool:
        """Return whether it can receive the KV of the prefill ranks."""


class Waits(NamedTuple):
    """These are the waits of a request for its turn, in seconds. A wait is infinite where the plan is not
    possible."""

    is_local: bool  # whether plan local may be chosen
    is_remote: bool  # whether plan remote may be chosen

    def local_s(self, decode: Receiving) -> float:
        return max(decode.queue_wait_s, decode.compute_wait_s) if self.is_local else inf

    def remote_s(self, decode: Receiving, compute_s: float) -> float:
        return decode.queue_wait_s + compute_s if self.is_remote and decode.receives else inf

    def shortest_s(self, decode: Receiving, compute_s: float) -> float:
        return min(self.local_s(decode), self.remote_s(decode, compute_s))

    def about_s(self, decodes: Iterable[Receiving], prefills: Iterable[Computing], enough_s: float) -> float:
        """Return the shortest wait at any of the ranks, estimated from a few of them, or infinity where none
        can serve.

        It returns 0 as soon as it finds a rank, or a pair of ranks, with a wait of `enough_s` or less. Where
        there are many ranks they come in the order of load, so if the first ones compute too late, the others
        do too. That order says nothing about the free pages of a decode rank: ranks without them do not count
        among the few.
        """
        compute_s = self._soonest_s(prefills, enough_s)
        shortest_s, looked_at = inf, 0
        for decode in decodes:
            room_s = decode.queue_wait_s
            if room_s >= shortest_s:
                continue
            local_s, theirs_s = self.local_s(decode), compute_s if decode.receives else inf
            if min(local_s, max(room_s, theirs_s)) <= enough_s:
                return 0.0
            shortest_s = min(shortest_s, local_s, self.remote_s(decode, compute_s))
            looked_at += room_s <= enough_s
            if looked_at == _LOOKED_AT and compute_s > enough_s:
                break
        return shortest_s

    def _soonest_s(self, prefills: Iterable[Computing], enough_s: float) -> float:
        soonest_s = inf
        if self.is_remote:
            for prefill, _ in zip(prefills, range(_LOOKED_AT), strict=False):
                soonest_s = min(soonest_s, prefill.compute_wait_s)
                if soonest_s <= enough_s:
                    break
        return soonest_s


@cache
def waits_of(plans: frozenset[Plan]) -> Waits:
    return Waits(Plan.LOCAL in plans, Plan.REMOTE in plans)


def allowed_wait_s(max_wait_s: float, remaining_s: float) -> float:
    """Return the seconds that a request may wait whose deadline is in `remaining_s`."""
    return min(max_wait_s, _WAIT_SHARE * remaining_s)


def bound_s(max_wait_s: float, decodes: Iterable[Receiving], prefills: Iterable[Computing]) -> float:
    """Return `max_wait_s`, or infinity where no pair of these ranks makes a request wait longer.

    The latter is the usual case, and spares the caller the check of each rank.
    """
    if max_wait_s == inf:
        return inf
    there_s = max((decode.queue_wait_s + decode.compute_wait_s for decode in decodes), default=0.0)
    before_s = max((prefill.compute_wait_s for prefill in prefills), default=0.0)
    return max_wait_s if there_s + before_s > max_wait_s else inf


def refusal(wait_s: float, allowed_s: float) -> NoCapacity:
    retry_after_s = max(_SOONEST_S, wait_s - allowed_s)
    return NoCapacity(
        f"the cluster is full: the request would wait {wait_s:.1f} s for its turn, {allowed_s:.1f} s at most "
        f"are allowed; try again in {retry_after_s:.0f} s",
        retry_after_s,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """This is a prompt to be placed, with the limits on the choice of its ranks."""

    hashes: Sequence[BlockHash]  # of its full index blocks
    prompt_tokens: int
    plans: frozenset[Plan]
    pinned: RankKey | None = None  # the conversation's decode rank
    tried: frozenset[RankId] = frozenset()  # the lives of ranks at which it failed
    max_wait_s: float = inf  # the longest wait for its turn
    most_tokens: int | None = None  # the limit of prompt and output together; None: there is no limit
    must_hold: int = 0  # the tokens of one request that a decode rank must be able to hold
    at: RankId | None = None  # the one decode rank that may be chosen: it holds the prompt for another answer
    answers: int = 1  # the number of answers that will be requested there
    adapter: Adapter | None = None  # both ranks must have loaded it
    reusable_tokens: float = inf  # the tokens of the prompt that may come from a cache

    @property
    def most_reused(self) -> int:
        """Return the tokens that may be reused. The last one is always computed, since its logits choose the
        next token."""
        return int(min(self.prompt_tokens - 1, self.reusable_tokens))


class SourceCandidate(NamedTuple):
    """This rank holds more of the prompt than the candidate that would compute it, and the candidate may pull
    that."""

    id: RankId
    tokens: int  # the candidate could go on after these, as far as the index is trusted about the source
    matched_tokens: int  # the same by the index alone
    running: int  # the sequences whose tokens come later while the source writes
    pull_s: float


class Brought(NamedTuple):
    """A candidate would bring this up from its tiers before it computes the prompt."""

    tokens: int  # the candidate could go on after these, as far as the index is trusted about its tiers
    matched_tokens: int  # the same by the index alone
    bring_s: float
    shared_tokens: int = 0  # the last of them, which other ranks' files hold


class DecodeCandidate(NamedTuple):
    """This is a decode rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # the expected decode_prefix_len under plan remote
    pending_tokens: int  # queued or being computed there, before this prompt
    prefill_tokens_per_s: float
    running: int  # the number of running sequences
    token_s: float  # the seconds between two tokens of a sequence
    free_tokens: int  # the tokens that fit in free pages
    evictable_tokens: int  # the tokens in cached pages that nobody locks
    excluded: str = ""  # why it cannot be chosen (draining, failed, ...); empty: it can
    queued: int = 0  # the number of requests whose prompts wait to be computed there
    matched_tokens: int = 0  # the hit by the index alone, before trust and predictions
    waiting_tokens: int = 0  # the tokens of requests that wait for pages before this one
    own: bool = True  # whether it is of this router's share; see rank_order.py
    queue_wait_s: float = 0.0  # the time until it has pages for the next request
    compute_wait_s: float = 0.0  # the time until it computes the next prompt; 0 where its rate is not known
    holds_tokens: float = inf  # the most tokens of one request, prompt and output together
    receives: bool = True  # whether it can receive the prefill ranks' KV; if not, only plan local is possible
    resume_tokens: int | None = None  # the last checkpoint in the hit; None: it can go on at the hit's end
    matched_resume_tokens: int | None = None  # the same by the index alone
    tokens_per_step: float = 0.0  # the tokens that a sequence gets in a step; 0: not known
    sources: tuple[SourceCandidate, ...] = ()  # for plan local
    brought: Brought | None = None  # for plan local, without a source
    back_s: float = inf  # the time to bring a token back up that it evicts; infinite where no tier keeps it
    passed_tokens: int = 0  # the pending tokens of prompts that this one goes before
    passed_prompts: int = 0

    @property
    def reused_tokens(self) -> int:
        """Return the tokens of its pool that it need not compute under plan local."""
        return self.hit_tokens if self.resume_tokens is None else self.resume_tokens

    @property
    def found_tokens(self) -> int:
        """Return the same count with what it brings up."""
        reused = self.hit_tokens if self.resume_tokens is None else self.resume_tokens
        return reused if self.brought is None else max(reused, self.brought.tokens)

    @property
    def held_tokens(self) -> int:
        """Return the tokens that it holds itself, in its pool or below."""
        if (brought := self.brought) is None:
            return self.hit_tokens
        return max(self.hit_tokens, brought.tokens - brought.shared_tokens)

    @property
    def bring_s(self) -> float:
        return 0.0 if self.brought is None else self.brought.bring_s

    @property
    def indexed_reused_tokens(self) -> int:
        """Return the same count by the index alone."""
        return self.matched_tokens if self.matched_resume_tokens is None else self.matched_resume_tokens

    @property
    def as_indexed(self) -> "DecodeCandidate":
        return self._replace(hit_tokens=self.matched_tokens, resume_tokens=self.matched_resume_tokens)

    @property
    def has_room(self) -> bool:
        return self.waiting_tokens <= self.free_tokens + self.evictable_tokens


class PrefillCandidate(NamedTuple):
    """This is a prefill rank as one request sees it. `prefill_tokens_per_s` is positive."""

    id: RankId
    hit_tokens: int  # the tokens of the prompt that it is expected to hold
    pending_tokens: int
    prefill_tokens_per_s: float
    free_tokens: int = 0
    evictable_tokens: int = 0
    excluded: str = ""
    queued: int = 0
    matched_tokens: int = 0
    own: bool = True
    compute_wait_s: float = 0.0
    holds_tokens: float = inf  # the most tokens of one prompt
    resume_tokens: int | None = None  # the expected prefill_prefix_len; None: the hit
    matched_resume_tokens: int | None = None
    sources: tuple[SourceCandidate, ...] = ()
    brought: Brought | None = None
    back_s: float = inf
    passed_tokens: int = 0
    passed_prompts: int = 0

    @property
    def reused_tokens(self) -> int:
        return self.hit_tokens if self.resume_tokens is None else self.resume_tokens

    @property
    def found_tokens(self) -> int:
        reused = self.hit_tokens if self.resume_tokens is None else self.resume_tokens
        return reused if self.brought is None else max(reused, self.brought.tokens)

    @property
    def bring_s(self) -> float:
        return 0.0 if self.brought is None else self.brought.bring_s

    @property
    def indexed_reused_tokens(self) -> int:
        return self.matched_tokens if self.matched_resume_tokens is None else self.matched_resume_tokens

    @property
    def as_indexed(self) -> "PrefillCandidate":
        return self._replace(hit_tokens=self.matched_tokens, resume_tokens=self.matched_resume_tokens)


Candidate = DecodeCandidate | PrefillCandidate


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    prompt_tokens: int
    kv_bytes_per_token: float
    chunk_tokens: int  # prefill computes and sends so many tokens at a time
    pinned: RankKey | None = None  # the conversation's decode rank
    plans: frozenset[Plan] = frozenset(Plan)
    max_wait_s: float = inf  # the longest wait for its turn
    most_tokens: int | None = None  # prompt and output together; None: no limit, or more than any rank holds
    longest_tokens: float = 0  # the most tokens of one request that any decode rank holds
    carried_bytes: float = 0.0  # the per-request state at its end; always sent, whatever decode holds
    prefill_requests_per_s: float = 0.0  # the prompts that come to be computed at one rank
    decode_requests_per_s: float = 0.0
    paid_tokens: int = 0  # the most that any rank need not compute
    paid_s: float = 0.0  # Requests have waited so long at ranks that hold those, while others had less to do.

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.chunk_tokens < 1 or not self.plans:
            raise ValueError(f"a prompt, a chunk and a plan are needed to place a request: {self}")

    @property
    def waits(self) -> Waits:
        return waits_of(self.plans)
