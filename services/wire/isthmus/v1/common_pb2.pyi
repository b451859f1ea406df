from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plan(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_UNSPECIFIED: _ClassVar[Plan]
    PLAN_REMOTE: _ClassVar[Plan]
    PLAN_LOCAL: _ClassVar[Plan]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_CAPACITY: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
PLAN_UNSPECIFIED: Plan
PLAN_REMOTE: Plan
PLAN_LOCAL: Plan
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_CAPACITY: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "constraint", "logit_bias", "bad_words", "bad_token_ids", "include_stop_str_in_output", "prompt_logprobs", "prompt_logprobs_start")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logprobs: int
    constraint: Constraint
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    include_stop_str_in_output: bool
    prompt_logprobs: int
    prompt_logprobs_start: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logprobs: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., include_stop_str_in_output: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., prompt_logprobs_start: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "grammar", "choice")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    grammar: str
    choice: Choice
    def __init__(self, json_object: _Optional[bool] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class PackedLogprobs(_message.Message):
    __slots__ = ("num_top", "logprobs", "ranks", "top_ids", "top_logprobs")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, num_top: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RankId(_message.Message):
    __slots__ = ("worker", "rank", "generation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    generation: int
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class RankAddress(_message.Message):
    __slots__ = ("id", "endpoint")
    ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    id: RankId
    endpoint: str
    def __init__(self, id: _Optional[_Union[RankId, _Mapping]] = ..., endpoint: _Optional[str] = ...) -> None: ...

class TenantShare(_message.Message):
    __slots__ = ("tenant", "weight", "session_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    session_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., session_tokens: _Optional[int] = ...) -> None: ...

class PullSource(_message.Message):
    __slots__ = ("rank", "tokens")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    rank: RankAddress
    tokens: int
    def __init__(self, rank: _Optional[_Union[RankAddress, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Pulled(_message.Message):
    __slots__ = ("tokens", "bytes", "seconds", "refused", "held_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    bytes: int
    seconds: float
    refused: str
    held_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., refused: _Optional[str] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("running", "waiting", "pending_tokens", "free_pages", "cached_pages", "used_pages", "quarantined_pages", "total_pages", "step_s", "prefill_tokens_per_s", "draining", "waiting_tokens", "admitted_per_s", "stalled", "kv_paths", "tokens_per_step", "granted_pages", "memory_tier_bytes_per_s", "file_tier_bytes_per_s", "tiers_off", "shared_tier_bytes_per_s", "common_tokens", "overtaken")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_PER_S_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    KV_PATHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    GRANTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TIER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FILE_TIER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_OFF_FIELD_NUMBER: _ClassVar[int]
    SHARED_TIER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COMMON_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERTAKEN_FIELD_NUMBER: _ClassVar[int]
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
    kv_paths: _containers.RepeatedCompositeFieldContainer[KvPath]
    tokens_per_step: float
    granted_pages: int
    memory_tier_bytes_per_s: float
    file_tier_bytes_per_s: float
    tiers_off: bool
    shared_tier_bytes_per_s: float
    common_tokens: int
    overtaken: _containers.RepeatedCompositeFieldContainer[Overtaken]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., used_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., step_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., draining: _Optional[bool] = ..., waiting_tokens: _Optional[int] = ..., admitted_per_s: _Optional[float] = ..., stalled: _Optional[bool] = ..., kv_paths: _Optional[_Iterable[_Union[KvPath, _Mapping]]] = ..., tokens_per_step: _Optional[float] = ..., granted_pages: _Optional[int] = ..., memory_tier_bytes_per_s: _Optional[float] = ..., file_tier_bytes_per_s: _Optional[float] = ..., tiers_off: _Optional[bool] = ..., shared_tier_bytes_per_s: _Optional[float] = ..., common_tokens: _Optional[int] = ..., overtaken: _Optional[_Iterable[_Union[Overtaken, _Mapping]]] = ...) -> None: ...

class Overtaken(_message.Message):
    __slots__ = ("below_tokens", "tokens", "prompts")
    BELOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    below_tokens: int
    tokens: int
    prompts: int
    def __init__(self, below_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., prompts: _Optional[int] = ...) -> None: ...

class KvPath(_message.Message):
    __slots__ = ("kind", "reach", "lanes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reach: str
    lanes: str
    def __init__(self, kind: _Optional[str] = ..., reach: _Optional[str] = ..., lanes: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...
