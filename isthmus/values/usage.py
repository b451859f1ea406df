"""An answer had its costs, and was made somewhere. The fields are those of generation.proto, which says
more."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankId:
    """One incarnation of a rank has this id."""

    worker: str
    rank: int
    generation: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Usage:
    """These count tokens and bytes. prompt_tokens = reused_tokens + computed_tokens; under plan remote it
    is also decode_prefix_len + delta_tokens: what the decode rank held, and what crossed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    decode_prefix_len: int = 0
    delta_tokens: int = 0
    prefill_prefix_len: int = 0
    kv_bytes_moved: int = 0
    kv_bytes_saved: int = 0
    drift_tokens: int | None = None  # None says that the router has not seen the conversation.
    carried_bytes: Mapping[str, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    reasoning_tokens: int = 0
    constraint_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stages:
    """These are seconds to the first token; all but first_token_s add up to it."""

    tokenize_s: float = 0.0
    route_s: float = 0.0
    decode_queue_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_compute_s: float = 0.0
    transfer_s: float = 0.0
    first_token_s: float = 0.0
    router_queue_s: float = 0.0
    first_decode_step_s: float = 0.0
    relay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """`plan` is remote, where a prefill rank computed the prompt, or local. `usage` is None where it
    generated nothing."""

    decode: RankId
    prefill: RankId | None
    plan: str
    predicted_prefix_len: int
    reason: str
    usage: Usage | None
    predicted_reused_tokens: int


@dataclass(frozen=True, slots=True)
class Totals:
    """These are sums over a request's placements."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    delta_tokens: int = 0
    kv_bytes_moved: int = 0
    kv_bytes_saved: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logarithm is natural. `rank` is, of a prompt's tokens, 1 and how many are more probable there;
    else 0."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """They are of one token, from the model's logits before biases, penalties and temperature; `top` has
    the most probable first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
