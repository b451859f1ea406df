"""A router reports this of its ranks and of its choices. The fields are those of generation.proto, which
says more."""

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.values.usage import RankId


@dataclass(frozen=True, slots=True)
class Model:
    """A model has a context of so many tokens, prompt and output together, and so many ranks."""

    id: str
    max_context_tokens: int
    prefill_ranks: int
    decode_ranks: int


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt has these ids, in a context of so many tokens."""

    token_ids: tuple[int, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class CostTerm:
    """A term adds so many seconds to a candidate's price."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request could go this way, at this price; `excluded` says why it cannot be chosen."""

    decode: RankId | None
    prefill: RankId | None
    plan: str
    decode_hit_tokens: int
    prefill_hit_tokens: int
    terms: tuple[CostTerm, ...]
    total_s: float
    pinned: bool
    chosen: bool
    excluded: str
    decode_indexed_tokens: int
    prefill_indexed_tokens: int
    decode_context_tokens: int
    prefill_context_tokens: int
    decode_resume_tokens: int | None
    prefill_resume_tokens: int | None
    decode_indexed_resume_tokens: int | None
    prefill_indexed_resume_tokens: int | None
    decode_tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A request would go to `chosen`; `candidates` come cheapest first, then those without a price."""

    prompt_tokens: int
    candidates: tuple[Candidate, ...]
    reason: str
    degraded: str
    pinned: RankId | None
    carried_bytes: int
    constraint: str
    past_answers: Mapping[str, int]

    @property
    def chosen(self) -> Candidate | None:
        """Return the candidate that the request would go to, or None where there is none."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)


@dataclass(frozen=True, slots=True)
class KvPath:
    """A prefill rank has written KV by this path; the fields are those of common.proto."""

    kind: str
    reach: str
    lanes: str


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank does this now; the fields are those of common.proto."""

    running: int
    waiting: int
    pending_tokens: int
    free_pages: int
    cached_pages: int
    used_pages: int
    quarantined_pages: int
    total_pages: int
    step_s: float
    prefill_tokens_per_s: float
    draining: bool
    waiting_tokens: int
    admitted_per_s: float
    stalled: bool
    kv_paths: tuple[KvPath, ...]
    tokens_per_step: float
    granted_pages: int  # Other ranks pull them now.


@dataclass(frozen=True, slots=True)
class RankStatus:
    """`role` is prefill or decode; `state` is live, suspect or draining."""

    rank: RankId
    role: str
    state: str
    endpoint: str
    model: str
    index_blocks: int
    epoch: int
    next_sequence: int
    record_age_s: float
    current: bool
    trust: float
    load: RankLoad
    pending_tokens: int
    prefill_tokens_per_s: float
    excluded: str
    unregistered_s: float
    staleness_s: float
    resumable_blocks: int | None
    resume_trust: float | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """`degraded` says why the router places by what it remembers; it is empty where it does not."""

    ranks: tuple[RankStatus, ...]
    staleness_s: float
    degraded: str
