from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "token_ids", "parts", "reasoning", "tool_calls", "tool_call_id", "name", "answer_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedScalarFieldContainer[str]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    answer_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[str]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., answer_id: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict", "hidden")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    hidden: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ..., hidden: _Optional[bool] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "name")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ToolChoice.Mode]
        MODE_AUTO: _ClassVar[ToolChoice.Mode]
        MODE_NONE: _ClassVar[ToolChoice.Mode]
        MODE_REQUIRED: _ClassVar[ToolChoice.Mode]
    MODE_UNSPECIFIED: ToolChoice.Mode
    MODE_AUTO: ToolChoice.Mode
    MODE_NONE: ToolChoice.Mode
    MODE_REQUIRED: ToolChoice.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoice.Mode
    name: str
    def __init__(self, mode: _Optional[_Union[ToolChoice.Mode, str]] = ..., name: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "raw_answer", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RAW_ANSWER_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    chat_template_kwargs: str
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    raw_answer: bool
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., chat_template_kwargs: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: _Optional[bool] = ..., raw_answer: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "chat", "token_ids", "sampling", "conversation_id", "tenant", "priority", "add_special_tokens", "n", "best_of")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    chat: Chat
    token_ids: TokenIds
    sampling: _common_pb2.SamplingParams
    conversation_id: str
    tenant: str
    priority: int
    add_special_tokens: bool
    n: int
    best_of: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., conversation_id: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "reused_tokens", "computed_tokens", "decode_prefix_len", "delta_tokens", "prefill_prefix_len", "kv_bytes_moved", "kv_bytes_saved", "drift_tokens", "carried_bytes", "drafted_tokens", "accepted_draft_tokens", "reasoning_tokens", "constraint_s", "pulled_tokens", "pulled_bytes", "brought_tokens")
    class CarriedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    DELTA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SAVED_FIELD_NUMBER: _ClassVar[int]
    DRIFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_S_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    computed_tokens: int
    decode_prefix_len: int
    delta_tokens: int
    prefill_prefix_len: int
    kv_bytes_moved: int
    kv_bytes_saved: int
    drift_tokens: int
    carried_bytes: _containers.ScalarMap[str, int]
    drafted_tokens: int
    accepted_draft_tokens: int
    reasoning_tokens: int
    constraint_s: float
    pulled_tokens: int
    pulled_bytes: int
    brought_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., decode_prefix_len: _Optional[int] = ..., delta_tokens: _Optional[int] = ..., prefill_prefix_len: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., kv_bytes_saved: _Optional[int] = ..., drift_tokens: _Optional[int] = ..., carried_bytes: _Optional[_Mapping[str, int]] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., constraint_s: _Optional[float] = ..., pulled_tokens: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., brought_tokens: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("tokenize_s", "route_s", "decode_queue_s", "prefill_queue_s", "prefill_compute_s", "transfer_s", "first_token_s", "router_queue_s", "first_decode_step_s", "relay_s", "pull_s")
    TOKENIZE_S_FIELD_NUMBER: _ClassVar[int]
    ROUTE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    RELAY_S_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    tokenize_s: float
    route_s: float
    decode_queue_s: float
    prefill_queue_s: float
    prefill_compute_s: float
    transfer_s: float
    first_token_s: float
    router_queue_s: float
    first_decode_step_s: float
    relay_s: float
    pull_s: float
    def __init__(self, tokenize_s: _Optional[float] = ..., route_s: _Optional[float] = ..., decode_queue_s: _Optional[float] = ..., prefill_queue_s: _Optional[float] = ..., prefill_compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., router_queue_s: _Optional[float] = ..., first_decode_step_s: _Optional[float] = ..., relay_s: _Optional[float] = ..., pull_s: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("decode", "prefill", "plan", "predicted_prefix_len", "reason", "usage", "predicted_reused_tokens", "source", "pull_refused")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PULL_REFUSED_FIELD_NUMBER: _ClassVar[int]
    decode: _common_pb2.RankId
    prefill: _common_pb2.RankId
    plan: _common_pb2.Plan
    predicted_prefix_len: int
    reason: str
    usage: Usage
    predicted_reused_tokens: int
    source: _common_pb2.RankId
    pull_refused: str
    def __init__(self, decode: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.Plan, str]] = ..., predicted_prefix_len: _Optional[int] = ..., reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., predicted_reused_tokens: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., pull_refused: _Optional[str] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "reused_tokens", "computed_tokens", "delta_tokens", "kv_bytes_moved", "kv_bytes_saved", "drafted_tokens", "accepted_draft_tokens", "pulled_tokens", "pulled_bytes", "brought_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DELTA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SAVED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    computed_tokens: int
    delta_tokens: int
    kv_bytes_moved: int
    kv_bytes_saved: int
    drafted_tokens: int
    accepted_draft_tokens: int
    pulled_tokens: int
    pulled_bytes: int
    brought_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., delta_tokens: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., kv_bytes_saved: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., pulled_tokens: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., brought_tokens: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "matched_stop", "usage", "placement", "stages", "placements", "totals", "answer_id", "left_out")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    matched_stop: str
    usage: Usage
    placement: Placement
    stages: StageTimes
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    totals: Totals
    answer_id: str
    left_out: Totals
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., stages: _Optional[_Union[StageTimes, _Mapping]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., answer_id: _Optional[str] = ..., left_out: _Optional[_Union[Totals, _Mapping]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "finish", "prompt_token_ids", "reasoning", "tool_calls", "answer_id", "index", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish: Finish
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    answer_id: str
    index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., answer_id: _Optional[str] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("decode", "prefill", "plan", "decode_hit_tokens", "prefill_hit_tokens", "terms", "total_s", "pinned", "chosen", "excluded", "decode_indexed_tokens", "prefill_indexed_tokens", "decode_context_tokens", "prefill_context_tokens", "decode_resume_tokens", "prefill_resume_tokens", "decode_indexed_resume_tokens", "prefill_indexed_resume_tokens", "decode_tokens_per_step", "source", "source_tokens", "brought_tokens")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DECODE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    DECODE_INDEXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INDEXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RESUME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RESUME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INDEXED_RESUME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INDEXED_RESUME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    decode: _common_pb2.RankId
    prefill: _common_pb2.RankId
    plan: _common_pb2.Plan
    decode_hit_tokens: int
    prefill_hit_tokens: int
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    total_s: float
    pinned: bool
    chosen: bool
    excluded: str
    decode_indexed_tokens: int
    prefill_indexed_tokens: int
    decode_context_tokens: int
    prefill_context_tokens: int
    decode_resume_tokens: int
    prefill_resume_tokens: int
    decode_indexed_resume_tokens: int
    prefill_indexed_resume_tokens: int
    decode_tokens_per_step: float
    source: _common_pb2.RankId
    source_tokens: int
    brought_tokens: int
    def __init__(self, decode: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.Plan, str]] = ..., decode_hit_tokens: _Optional[int] = ..., prefill_hit_tokens: _Optional[int] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ..., total_s: _Optional[float] = ..., pinned: _Optional[bool] = ..., chosen: _Optional[bool] = ..., excluded: _Optional[str] = ..., decode_indexed_tokens: _Optional[int] = ..., prefill_indexed_tokens: _Optional[int] = ..., decode_context_tokens: _Optional[int] = ..., prefill_context_tokens: _Optional[int] = ..., decode_resume_tokens: _Optional[int] = ..., prefill_resume_tokens: _Optional[int] = ..., decode_indexed_resume_tokens: _Optional[int] = ..., prefill_indexed_resume_tokens: _Optional[int] = ..., decode_tokens_per_step: _Optional[float] = ..., source: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., source_tokens: _Optional[int] = ..., brought_tokens: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("prompt_tokens", "candidates", "reason", "degraded", "pinned", "carried_bytes", "constraint", "past_answers")
    class PastAnswersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CARRIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PAST_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    reason: str
    degraded: str
    pinned: _common_pb2.RankId
    carried_bytes: int
    constraint: str
    past_answers: _containers.ScalarMap[str, int]
    def __init__(self, prompt_tokens: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., reason: _Optional[str] = ..., degraded: _Optional[str] = ..., pinned: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., carried_bytes: _Optional[int] = ..., constraint: _Optional[str] = ..., past_answers: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_context_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_context_tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "tenant")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListRanksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "role", "state", "endpoint", "model", "index_blocks", "epoch", "next_sequence", "record_age_s", "current", "trust", "load", "pending_tokens", "prefill_tokens_per_s", "excluded", "unregistered_s", "staleness_s", "resumable_blocks", "resume_trust")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECORD_AGE_S_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    UNREGISTERED_S_FIELD_NUMBER: _ClassVar[int]
    STALENESS_S_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TRUST_FIELD_NUMBER: _ClassVar[int]
    rank: _common_pb2.RankId
    role: _common_pb2.Role
    state: str
    endpoint: str
    model: str
    index_blocks: int
    epoch: int
    next_sequence: int
    record_age_s: float
    current: bool
    trust: float
    load: _common_pb2.RankLoad
    pending_tokens: int
    prefill_tokens_per_s: float
    excluded: str
    unregistered_s: float
    staleness_s: float
    resumable_blocks: int
    resume_trust: float
    def __init__(self, rank: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., state: _Optional[str] = ..., endpoint: _Optional[str] = ..., model: _Optional[str] = ..., index_blocks: _Optional[int] = ..., epoch: _Optional[int] = ..., next_sequence: _Optional[int] = ..., record_age_s: _Optional[float] = ..., current: _Optional[bool] = ..., trust: _Optional[float] = ..., load: _Optional[_Union[_common_pb2.RankLoad, _Mapping]] = ..., pending_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., excluded: _Optional[str] = ..., unregistered_s: _Optional[float] = ..., staleness_s: _Optional[float] = ..., resumable_blocks: _Optional[int] = ..., resume_trust: _Optional[float] = ...) -> None: ...

class ListRanksResponse(_message.Message):
    __slots__ = ("ranks", "staleness_s", "degraded")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_S_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    staleness_s: float
    degraded: str
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., staleness_s: _Optional[float] = ..., degraded: _Optional[str] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "weight", "running_requests", "held_tokens", "requests", "prompt_tokens", "computed_tokens", "reused_tokens", "completion_tokens", "kv_bytes_moved", "refused", "limits")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    running_requests: int
    held_tokens: int
    requests: int
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    completion_tokens: int
    kv_bytes_moved: int
    refused: _containers.ScalarMap[str, int]
    limits: _containers.ScalarMap[str, float]
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., running_requests: _Optional[int] = ..., held_tokens: _Optional[int] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ..., limits: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("interval_s", "tenant", "all_tenants", "no_candidates")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    NO_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    tenant: str
    all_tenants: bool
    no_candidates: bool
    def __init__(self, interval_s: _Optional[float] = ..., tenant: _Optional[str] = ..., all_tenants: _Optional[bool] = ..., no_candidates: _Optional[bool] = ...) -> None: ...

class WatchClusterResponse(_message.Message):
    __slots__ = ("ranks", "gone", "running", "finished", "dropped", "staleness_s", "degraded", "num_running")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_S_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    gone: _containers.RepeatedCompositeFieldContainer[_common_pb2.RankId]
    running: _containers.RepeatedCompositeFieldContainer[RunningRequest]
    finished: _containers.RepeatedCompositeFieldContainer[FinishedRequest]
    dropped: int
    staleness_s: float
    degraded: str
    num_running: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[_common_pb2.RankId, _Mapping]]] = ..., running: _Optional[_Iterable[_Union[RunningRequest, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[FinishedRequest, _Mapping]]] = ..., dropped: _Optional[int] = ..., staleness_s: _Optional[float] = ..., degraded: _Optional[str] = ..., num_running: _Optional[int] = ...) -> None: ...

class RunningRequest(_message.Message):
    __slots__ = ("request_id", "conversation_id", "model", "age_s", "prompt_tokens", "completion_tokens", "decode", "prefill", "tenant", "answers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    conversation_id: str
    model: str
    age_s: float
    prompt_tokens: int
    completion_tokens: int
    decode: _common_pb2.RankId
    prefill: _common_pb2.RankId
    tenant: str
    answers: int
    def __init__(self, request_id: _Optional[str] = ..., conversation_id: _Optional[str] = ..., model: _Optional[str] = ..., age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., tenant: _Optional[str] = ..., answers: _Optional[int] = ...) -> None: ...

class FinishedRequest(_message.Message):
    __slots__ = ("request_id", "conversation_id", "model", "outcome", "ended_at_s", "duration_s", "finish", "candidates", "tool_calls", "constraint", "tenant", "answers", "completion_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    conversation_id: str
    model: str
    outcome: str
    ended_at_s: float
    duration_s: float
    finish: Finish
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    tool_calls: int
    constraint: str
    tenant: str
    answers: int
    completion_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., conversation_id: _Optional[str] = ..., model: _Optional[str] = ..., outcome: _Optional[str] = ..., ended_at_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., tool_calls: _Optional[int] = ..., constraint: _Optional[str] = ..., tenant: _Optional[str] = ..., answers: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "max_context_tokens", "prefill_ranks", "decode_ranks", "base")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANKS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_context_tokens: int
    prefill_ranks: int
    decode_ranks: int
    base: str
    def __init__(self, id: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., prefill_ranks: _Optional[int] = ..., decode_ranks: _Optional[int] = ..., base: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ListLoadRequest(_message.Message):
    __slots__ = ("salt", "model")
    SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    salt: int
    model: str
    def __init__(self, salt: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class ListLoadResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "prefill_ranks", "decode_ranks", "routers", "block_tokens", "chunk_tokens", "prefill_pool_tokens", "decode_pool_tokens", "kv_bytes_per_token", "carried_bytes", "plans", "window_s", "tokens_per_s", "step_s", "requests", "computes_in_order")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANKS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CARRIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_IN_ORDER_FIELD_NUMBER: _ClassVar[int]
    model: str
    prefill_ranks: int
    decode_ranks: int
    routers: int
    block_tokens: int
    chunk_tokens: int
    prefill_pool_tokens: int
    decode_pool_tokens: int
    kv_bytes_per_token: float
    carried_bytes: int
    plans: _containers.RepeatedScalarFieldContainer[_common_pb2.Plan]
    window_s: float
    tokens_per_s: float
    step_s: float
    requests: _containers.RepeatedCompositeFieldContainer[ObservedRequest]
    computes_in_order: bool
    def __init__(self, model: _Optional[str] = ..., prefill_ranks: _Optional[int] = ..., decode_ranks: _Optional[int] = ..., routers: _Optional[int] = ..., block_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., prefill_pool_tokens: _Optional[int] = ..., decode_pool_tokens: _Optional[int] = ..., kv_bytes_per_token: _Optional[float] = ..., carried_bytes: _Optional[int] = ..., plans: _Optional[_Iterable[_Union[_common_pb2.Plan, str]]] = ..., window_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., step_s: _Optional[float] = ..., requests: _Optional[_Iterable[_Union[ObservedRequest, _Mapping]]] = ..., computes_in_order: _Optional[bool] = ...) -> None: ...

class ObservedRequest(_message.Message):
    __slots__ = ("age_s", "prompt_tokens", "output_tokens", "computed_tokens", "reused_tokens", "moved_tokens", "ttft_s", "duration_s", "queue_s", "compute_s", "transfer_s", "remote", "running", "conversation", "blocks")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    reused_tokens: int
    moved_tokens: int
    ttft_s: float
    duration_s: float
    queue_s: float
    compute_s: float
    transfer_s: float
    remote: bool
    running: bool
    conversation: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., moved_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., remote: _Optional[bool] = ..., running: _Optional[bool] = ..., conversation: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...
