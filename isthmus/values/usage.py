"""These are the costs and the placement of an answer. generation.proto documents the fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankId:
    """It names one incarnation of a rank."""

    worker: str
    rank: int
    generation: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Usage:
    """These are numbers of tokens and bytes.

    prompt_tokens = reused_tokens + computed_tokens. Under plan remote it also is decode_prefix_len, which the
    decode rank held, plus delta_tokens, which were transferred.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    decode_prefix_len: int = 0
    delta_tokens: int = 0
    prefill_prefix_len: int = 0
    kv_bytes_moved: int = 0
    kv_bytes_saved: int = 0
    drift_tokens: int | None = None  # None means that the router did not know the conversation.
    carried_bytes: Mapping[str, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    reasoning_tokens: int = 0
    constraint_s: float = 0.0
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    brought_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages before the first token took these seconds; first_token_s is the sum of the others."""

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
    pull_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """`plan` is remote if a prefill rank computed the prompt, else local. `usage` is None if nothing was
    generated.
    """

    decode: RankId
    prefill: RankId | None
    plan: str
    predicted_prefix_len: int
    reason: str
    usage: Usage | None
    predicted_reused_tokens: int
    source: RankId | None
    pull_refused: str


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
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    brought_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logarithm is natural. For a prompt's token `rank` is 1 plus the number of more probable tokens,
    else 0.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, from the model's logits before biases, penalties and temperature; `top`
    has the most probable first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
