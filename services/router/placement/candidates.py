"""These values say what a request asks for, how it sees ranks, and how long it would wait there. Pure.

It waits for room at the decode rank, and behind the prompts that are computed before its own:

    remote   room(D) + compute(P)        it comes to the prefill rank with its pages in hand
    local    max(room(D), compute(D))    those that wait for room there are among those that will be computed

A cluster that takes in more than it serves makes everybody wait until deadlines end them, and then has worked
for nobody. So admission control refuses at the door who would wait too long, with the time after which it may
come again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple, Protocol

from services.values.errors import NoCapacity
from services.values.kv import BlockHash
from services.values.rank import Plan, RankId, RankKey

# A request may wait for so much of its time. The rest is for its prompt, its answer and wrong predictions.
_WAIT_SHARE = 0.5
_SOONEST_S = 1.0
_LOOKED_AT = 64  # of a role, when what is wanted is any rank in time


class Computing(Protocol):
    """A rank that computes prompts, as the next one sees it."""

    @property
    def compute_wait_s(self) -> float:
        """Return the seconds until it computes the prompt, or 0 where its rate is not known."""


class Receiving(Computing, Protocol):
    """A decode rank."""

    @property
    def queue_wait_s(self) -> float:
        """Return the seconds until it has room."""

    @property
    def receives(self) -> bool:
        """The prefill ranks' KV."""


class Waits(NamedTuple):
    """These are a request's waits for its turn, in seconds; infinite where the plan cannot be."""

    is_local: bool  # This says whether plan local can be,
    is_remote: bool  # and this whether plan remote can.

    def local_s(self, decode: Receiving) -> float:
        return max(decode.queue_wait_s, decode.compute_wait_s) if self.is_local else inf

    def remote_s(self, decode: Receiving, compute_s: float) -> float:
        """Return the wait with a prefill rank that computes the prompt in `compute_s`."""
        return decode.queue_wait_s + compute_s if self.is_remote and decode.receives else inf

    def shortest_s(self, decode: Receiving, compute_s: float) -> float:
        """Return the shortest wait at this decode rank; `compute_s` is as above, of the prefill rank that is
        soonest."""
        return min(self.local_s(decode), self.remote_s(decode, compute_s))

    def about_s(self, decodes: Iterable[Receiving], prefills: Iterable[Computing], enough_s: float) -> float:
        """Return the wait at the best of the ranks, told by looking at few; it is infinite where there is
        nowhere to go. It is 0 as soon as a rank is found, or each of a pair, with a wait of `enough_s` or
        less. Many ranks come in the order of load: if the first ones do not compute in time, neither do the
        others, unless they lack room. When a decode rank has room is in no order."""
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
    """Return the waits by the plans that may be chosen."""
    return Waits(Plan.LOCAL in plans, Plan.REMOTE in plans)


def allowed_wait_s(max_wait_s: float, remaining_s: float) -> float:
    """Return the seconds that a request may wait whose deadline is in `remaining_s`."""
    return min(max_wait_s, _WAIT_SHARE * remaining_s)


def bound_s(max_wait_s: float, decodes: Iterable[Receiving], prefills: Iterable[Computing]) -> float:
    """`max_wait_s`, or infinite where no rank or pair of these makes one wait longer, as mostly none does:
    then nobody need look at each."""
    if max_wait_s == inf:
        return inf
    there_s = max((decode.queue_wait_s + decode.compute_wait_s for decode in decodes), default=0.0)
    before_s = max((prefill.compute_wait_s for prefill in prefills), default=0.0)
    return max_wait_s if there_s + before_s > max_wait_s else inf


def refusal(wait_s: float, allowed_s: float) -> NoCapacity:
    """Return what to tell a request that would wait `wait_s`, longer than it may."""
    retry_after_s = max(_SOONEST_S, wait_s - allowed_s)
    return NoCapacity(
        f"the cluster is full: the request would wait {wait_s:.1f} s for its turn, {allowed_s:.1f} s at most "
        f"are allowed; try again in {retry_after_s:.0f} s",
        retry_after_s,
    )


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


class SourceCandidate(NamedTuple):
    """A rank that holds more of the prompt than a candidate that would compute it, which may pull that."""

    id: RankId
    tokens: int  # up to where that one could go on, at the source's trust
    matched_tokens: int  # the index's word on it
    running: int  # sequences, whose tokens come later while it writes
    pull_s: float


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
    sources: tuple[SourceCandidate, ...] = ()  # for plan local

    @property
    def reused_tokens(self) -> int:
        """Return the tokens that it need not compute under plan local."""
        return self.hit_tokens if self.resume_tokens is None else self.resume_tokens

    @property
    def indexed_reused_tokens(self) -> int:
        """Return them as the index has them."""
        return self.matched_tokens if self.matched_resume_tokens is None else self.matched_resume_tokens

    @property
    def as_indexed(self) -> "DecodeCandidate":
        return self._replace(hit_tokens=self.matched_tokens, resume_tokens=self.matched_resume_tokens)

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
    sources: tuple[SourceCandidate, ...] = ()

    @property
    def reused_tokens(self) -> int:
        """Return the tokens that it need not compute."""
        return self.hit_tokens if self.resume_tokens is None else self.resume_tokens

    @property
    def indexed_reused_tokens(self) -> int:
        """Return them as the index has them."""
        return self.matched_tokens if self.matched_resume_tokens is None else self.matched_resume_tokens

    @property
    def as_indexed(self) -> "PrefillCandidate":
        return self._replace(hit_tokens=self.matched_tokens, resume_tokens=self.matched_resume_tokens)


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
