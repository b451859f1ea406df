"""These are a router's reports on its ranks and its choices. generation.proto documents the fields."""

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.values.usage import RankId


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the router serves; `max_context_tokens` counts prompt and output together."""

    id: str
    max_context_tokens: int
    prefill_ranks: int
    decode_ranks: int
    base: str = ""  # Of an adapter, whose id is `base:name`, the model that it changes.


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`max_context_tokens` counts prompt and output together."""

    token_ids: tuple[int, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class CostTerm:
    """One part of a candidate's price, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible placement of a request, with its price; `excluded` is the reason if it cannot be chosen."""

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
    source: RankId | None
    source_tokens: int
    brought_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The placement that a request would get; `candidates` are sorted by price, and those without one come
    last.
    """

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
        """Return the candidate that would get the request, or None if there is none."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)


@dataclass(frozen=True, slots=True)
class KvPath:
    """A path by which a prefill rank has written KV. common.proto documents the fields."""

    kind: str
    reach: str
    lanes: str


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Prompts that a new one goes before. common.proto documents the fields."""

    below_tokens: int
    tokens: int
    prompts: int


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank's present load. common.proto documents the fields."""

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
    memory_tier_bytes_per_s: float
    file_tier_bytes_per_s: float
    shared_tier_bytes_per_s: float
    tiers_off: bool
    common_tokens: int | None  # Of pending_tokens; None where the rank does not tell.
    overtaken: tuple[Overtaken, ...]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A router's report on a rank. `role` is prefill or decode; `state` is live, suspect or draining."""

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
    """A router's report on its ranks. `degraded` is the reason if the router's index may be out of date, else
    empty.
    """

    ranks: tuple[RankStatus, ...]
    staleness_s: float
    degraded: str
