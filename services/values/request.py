"""These are an engine's requests and answers.

A constraint limits the text of an answer; services/grammar decides which tokens it allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

from services.values.adapter import Adapter, kv_scope
from services.values.errors import InvalidRequest
from services.values.prompt_logprobs import MAX_BYTES, PromptLogprobs, size_bytes
from services.values.rank import Plan, PullSource, RankAddress

MAX_CONSTRAINT_BYTES = 65_536


class ConstraintKind(Enum):
    """The values are the names of the fields of common.proto's Constraint."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """`texts` has the alternatives of a choice, nothing for a JSON object, and otherwise the schema, regular
    expression or grammar.

    Raises InvalidRequest that names the field; it does not check that a schema or a grammar is valid.
    """

    kind: ConstraintKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size_bytes > MAX_CONSTRAINT_BYTES:
            raise self.refused(f"must be at most {MAX_CONSTRAINT_BYTES} bytes, got {self.size_bytes}")
        if self.kind is not ConstraintKind.JSON_OBJECT and not (self.texts and all(self.texts)):
            raise self.refused("must not be empty")

    @property
    def size_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)

    @property
    def field_name(self) -> str:
        return f"sampling.constraint.{self.kind.value}"

    @property
    def text(self) -> str:
        (only,) = self.texts
        return only

    def refused(self, problem: str) -> InvalidRequest:
        return InvalidRequest(self.field_name, problem)


MAX_ID_CHARS = 128
# This is a year. gRPC counts nanoseconds since 1970 in 64 bits, 292 years, and treats a later deadline as one
# that has passed; and in a float a clock's seconds would lose their fractions long before.
MAX_TIMEOUT_S = 365 * 86_400.0
MAX_STOP_STRINGS = 16
_MAX_STOP_CHARS = 1024
_MAX_STOP_TOKEN_IDS = 1024
_MAX_BIAS = 100.0  # This is OpenAI's limit.
_MAX_BIASES = 1024
MAX_BAD_WORDS = 64
_MAX_BAD_WORD_CHARS = 1024
_MAX_BAD_SEQUENCES = 1024
_MAX_BAD_IDS = 65_536


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """These parameters decide how tokens are chosen; the fields are those of common.proto, with defaults
    filled in. Raises InvalidRequest that names a field whose value is out of range."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 means all tokens.
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None  # None means until the context is full.
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # The router handles this; engines ignore it.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    constraint: Constraint | None = None  # It limits which tokens may be chosen.
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # Each is (token id, addition), with distinct ids.
    bad_words: tuple[str, ...] = ()  # The router makes bad_token_ids of them.
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # The last id of each is not chosen after the others.
    include_stop_str_in_output: bool = False  # The router handles this, as `stop`.

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", "between 0 and 100", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(self.top_k >= 0, "top_k", "0 (all) or more", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        _require(0 <= self.seed < 2**64, "seed", "an unsigned 64-bit number", self.seed)
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", "1 or more", self.max_tokens)
            _require(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens", self.min_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        self._check_stops()
        self._check_biases()
        self._check_bad_words()
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, "between -2 and 2", value)
        penalty = self.repetition_penalty
        _require(0 < penalty <= 100, "repetition_penalty", "above 0 and at most 100", penalty)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require(0 <= count <= 20, name, "between 0 and 20", count)
        if (start := self.prompt_logprobs_start) and self.prompt_logprobs is None:
            _require(False, "prompt_logprobs_start", "0 without prompt_logprobs", start)
        if self.constraint is not None:  # Only the constraint decides where an answer may end.
            _require(self.min_tokens == 0, "min_tokens", "0 beside a constraint", self.min_tokens)
            _require(not self.ignore_eos, "ignore_eos", "false beside a constraint", self.ignore_eos)

    @property
    def without_prompt_logprobs(self) -> "SamplingParams":
        return replace(self, prompt_logprobs=None, prompt_logprobs_start=0)

    def _check_stops(self) -> None:
        """Check the stops. They are limited because each costs time at every token, on every rank."""
        if not self.stop and not self.stop_token_ids:
            return
        count, longest = len(self.stop), max(map(len, self.stop), default=0)
        _require(count <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", count)
        expected = f"made of strings of at most {_MAX_STOP_CHARS} characters"
        _require(longest <= _MAX_STOP_CHARS, "stop", expected, longest)
        _require(all(self.stop), "stop", "made of strings that are not empty", self.stop)
        count = len(self.stop_token_ids)
        _require(count <= _MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {_MAX_STOP_TOKEN_IDS} ids", count)

    def _check_biases(self) -> None:
        if not self.logit_bias:
            return
        count = len(self.logit_bias)
        _require(count <= _MAX_BIASES, "logit_bias", f"of at most {_MAX_BIASES} ids", count)
        for token_id, bias in self.logit_bias:
            _require(abs(bias) <= _MAX_BIAS, f"logit_bias[{token_id}]", "between -100 and 100", bias)

    def _check_bad_words(self) -> None:
        if not self.bad_words and not self.bad_token_ids:
            return
        count, longest = len(self.bad_words), max(map(len, self.bad_words), default=0)
        _require(count <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} strings", count)
        expected = f"made of strings of at most {_MAX_BAD_WORD_CHARS} characters"
        _require(longest <= _MAX_BAD_WORD_CHARS, "bad_words", expected, longest)
        _require(all(self.bad_words), "bad_words", "made of strings that are not empty", self.bad_words)
        count, num_ids = len(self.bad_token_ids), sum(map(len, self.bad_token_ids))
        _require(count <= _MAX_BAD_SEQUENCES, "bad_token_ids", f"at most {_MAX_BAD_SEQUENCES} lists", count)
        _require(num_ids <= _MAX_BAD_IDS, "bad_token_ids", f"of at most {_MAX_BAD_IDS} ids in all", num_ids)
        _require(all(self.bad_token_ids), "bad_token_ids", "made of lists that are not empty", ())

    def check_vocabulary(self, size: int) -> None:
        """Raise InvalidRequest that names the field if an id is outside the vocabulary."""
        if not self.logit_bias and not self.bad_token_ids:
            return
        ids = {
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "bad_token_ids": [token_id for each in self.bad_token_ids for token_id in each],
        }
        for name, own in ids.items():
            expected = f"of token ids below the vocabulary's size {size}"
            _require(max(own, default=0) < size, name, expected, max(own, default=0))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def heeds_output(self) -> bool:
        """Return whether the choice of a token depends on earlier output, other than through the model."""
        looks_back = any(len(ids) > 1 for ids in self.bad_token_ids)
        return self.penalizes or looks_back or self.constraint is not None


def reusable_of(sampling: SamplingParams, prompt_len: int) -> float:
    """Return how many tokens of a prompt its computation may take from a cache. Raises as `scored_of`."""
    return inf if sampling.prompt_logprobs is None else scored_of(sampling, prompt_len).start - 1


def scored_of(sampling: SamplingParams, prompt_len: int) -> range:
    """Return the positions of a prompt whose tokens' log-probabilities are requested. Raises InvalidRequest
    that names the field if they are not in the prompt, or too many."""
    num_top, start = sampling.prompt_logprobs, sampling.prompt_logprobs_start
    if num_top is None:
        return range(0)
    expected = f"less than the prompt's {prompt_len} tokens"
    _require(start < max(1, prompt_len), "prompt_logprobs_start", expected, start)
    scored = range(max(1, start), prompt_len)
    size, most = size_bytes(len(scored), num_top), MAX_BYTES >> 20
    expected = f"so small, or prompt_logprobs_start so large, that they take {most} MiB"
    _require(size <= MAX_BYTES, "prompt_logprobs", expected, num_top)
    return scored


def is_id(text: str) -> bool:
    return len(text) <= MAX_ID_CHARS and text.isprintable()


def _require(holds: bool, field_name: str, expected: str, value: object) -> None:
    # A comparison with NaN is false, so NaN is refused as well.
    if not holds:
        raise InvalidRequest(f"sampling.{field_name}", f"must be {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class TenantShare:
    """This says whose a request is where requests wait; see common.proto."""

    tenant: str
    weight: float = 1.0
    session_tokens: int = 0  # Its session has had so many before.


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """This is a request to an engine, in ids instead of text.

    `prompt_ids` are the client's prompt. Another rank generated `output_ids_so_far` before the stream moved
    here; generation continues after them, and sampling counts them as output.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids_so_far: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    plan: Plan = Plan.REMOTE
    eos_token_ids: tuple[int, ...] = ()
    pull_from: PullSource | None = None  # This is for the rank that computes the prompt.
    share: TenantShare | None = None  # Without it requests take turns by their salts.
    adapter: Adapter | None = None
    left_s: float | None = None  # So much was left of the deadline that its client had set, if any.
    kv_scope: str = field(init=False, repr=False, compare=False)  # Requests of one scope may share KV.

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_scope", kv_scope(self.cache_salt, self.adapter))

    @property
    def ending_ids(self) -> frozenset[int]:
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset((*self.sampling.stop_token_ids, *eos))

    @property
    def scored(self) -> range:
        return scored_of(self.sampling, len(self.prompt_ids))

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Return the ids whose KV the next token needs: the prompt's and those of the output so far."""
        return self.prompt_ids + self.output_ids_so_far


class FinishReason(Enum):
    """The reasons are those of common.proto. Ranks do not know tools: a router replaces STOP after calls by
    TOOL_CALLS.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    CAPACITY = "capacity"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float  # The logarithm is natural, before biases, penalties and temperature.
    top: tuple[tuple[int, float], ...] = ()  # Each is (token id, logprob), the most probable first.


@dataclass(frozen=True, slots=True)
class Pulled:
    # This is the result of a pull; see common.proto.
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: str = ""
    held_tokens: int | None = None  # The source could grant up to here; None means that it did not say.
    digested_pages: int = 0  # It counts as that of Admitted, and routers do not get it.


@dataclass(frozen=True, slots=True)
class PrefillResult:
    first_token_id: int
    first_token_logprobs: TokenLogprobs | None
    prefill_prefix_len: int
    computed_tokens: int
    kv_bytes_moved: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    pulled: Pulled | None = None
    brought_tokens: int = 0
    draft_tokens: int | None = None
    rank_tokens: int | None = None  # This is as that of Admitted.


@dataclass(frozen=True, slots=True)
class Admitted:
    """These are a decode rank's measurements of an admitted request; see decode.proto."""

    prompt_tokens: int
    decode_prefix_len: int
    prefill_prefix_len: int
    computed_tokens: int
    kv_bytes_moved: int
    kv_bytes_prompt: int
    decode_queue_s: float
    prefill_queue_s: float
    prefill_compute_s: float
    transfer_s: float
    plan: Plan
    first_decode_step_s: float = 0.0  # The service sets this: the wait besides all other times.
    digested_pages: int = 0  # This counts transferred pages and slots; routers do not get it.
    # These are a part of kv_bytes_moved, by GroupKind's value.
    carried_bytes: Mapping[str, int] = field(default_factory=dict)
    # This part of decode_queue_s passed until its constraint was compiled, or found compiled.
    constraint_s: float = 0.0
    pulled: Pulled | None = None  # This is the pull of the rank that computed; pulled tokens count as reused.
    brought_tokens: int = 0  # It brought these up from its tiers; they count as reused, too.
    # The rank that computed it computed so many tokens of all prompts from when it got this one to its first
    # token; None means that it does not count them.
    rank_tokens: int | None = None

    @property
    def reused_tokens(self) -> int:
        """Return the prompt tokens that the rank which computed the prompt had cached, brought up or pulled.
        Under plan remote, decode's cached tokens save bytes, not compute.
        """
        return self.prefill_prefix_len if self.plan is Plan.REMOTE else self.decode_prefix_len

    @property
    def pulled_tokens(self) -> int:
        """Return those of `reused_tokens` that came by a pull."""
        return 0 if self.pulled is None else self.pulled.tokens

    @property
    def own_reused_tokens(self) -> int:
        """Return those of `reused_tokens` that the rank had in its own pool."""
        return self.reused_tokens - self.pulled_tokens - self.brought_tokens

    @property
    def delta_tokens(self) -> int:
        return self.prompt_tokens - self.decode_prefix_len if self.plan is Plan.REMOTE else 0

    @property
    def kv_bytes_saved(self) -> int:
        return self.kv_bytes_prompt - self.kv_bytes_moved

    @property
    def rank_s(self) -> float:
        pull_s = self.pulled.seconds if self.pulled is not None else 0.0
        waits_s = self.decode_queue_s + self.prefill_queue_s + pull_s
        return waits_s + self.prefill_compute_s + self.transfer_s + self.first_decode_step_s


@dataclass(frozen=True, slots=True)
class Output:
    """These tokens of one request come from one engine step or several. The first output has `admitted`, and
    the prompt's log-probabilities.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    admitted: Admitted | None = None
    finished: FinishReason | None = None
    drafted_tokens: int = 0  # These steps verified this many.
    accepted_draft_tokens: int = 0  # This counts the drafted ones among the tokens.
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_tokens_alone(self) -> bool:
        more = self.logprobs or self.drafted_tokens or self.finished or self.admitted or self.prompt_logprobs
        return not more

    def followed_by(self, later: "Output") -> "Output":
        # `later` is not the first output, which alone has `admitted`.
        return Output(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.admitted,
            later.finished,
            self.drafted_tokens + later.drafted_tokens,
            self.accepted_draft_tokens + later.accepted_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A router sends a decode rank this request, with the rank that prefills it under plan remote.

    `sampling` is the client's SamplingParams, serialized, which a prefill rank gets unchanged.
    """

    request: GenerationRequest
    prefill: RankAddress | None = None
    timeout_s: float | None = None
    traceparent: str = ""
    sampling: bytes = b""
