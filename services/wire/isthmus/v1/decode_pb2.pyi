from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Command(_message.Message):
    __slots__ = ("start", "abort", "further")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    start: Start
    abort: AbortCommand
    further: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., abort: _Optional[_Union[AbortCommand, _Mapping]] = ..., further: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class AbortCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "output_ids_so_far", "sampling", "cache_salt", "priority", "plan", "prefill", "decode_generation", "timeout_s", "eos_token_ids", "traceparent", "number", "pull_from", "share", "adapter", "left_s", "coming")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_SO_FAR_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PULL_FROM_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids_so_far: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    cache_salt: str
    priority: int
    plan: _common_pb2.Plan
    prefill: _common_pb2.RankAddress
    decode_generation: int
    timeout_s: float
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    number: int
    pull_from: _common_pb2.PullSource
    share: _common_pb2.TenantShare
    adapter: _common_pb2.Adapter
    left_s: float
    coming: Coming
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids_so_far: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., plan: _Optional[_Union[_common_pb2.Plan, str]] = ..., prefill: _Optional[_Union[_common_pb2.RankAddress, _Mapping]] = ..., decode_generation: _Optional[int] = ..., timeout_s: _Optional[float] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., number: _Optional[int] = ..., pull_from: _Optional[_Union[_common_pb2.PullSource, _Mapping]] = ..., share: _Optional[_Union[_common_pb2.TenantShare, _Mapping]] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ..., left_s: _Optional[float] = ..., coming: _Optional[_Union[Coming, _Mapping]] = ...) -> None: ...

class Coming(_message.Message):
    __slots__ = ("rank", "blocks", "for_s", "resumable")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    rank: _common_pb2.RankId
    blocks: _containers.RepeatedScalarFieldContainer[int]
    for_s: float
    resumable: int
    def __init__(self, rank: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., blocks: _Optional[_Iterable[int]] = ..., for_s: _Optional[float] = ..., resumable: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "load", "numbers", "token_ids", "takes_further", "coming")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAKES_FURTHER_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    load: _common_pb2.RankLoad
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    takes_further: bool
    coming: _containers.RepeatedCompositeFieldContainer[Coming]
    def __init__(self, outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.RankLoad, _Mapping]] = ..., numbers: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., takes_further: _Optional[bool] = ..., coming: _Optional[_Iterable[_Union[Coming, _Mapping]]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "admitted", "finished", "error", "drafted_tokens", "accepted_draft_tokens", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    admitted: Admitted
    finished: _common_pb2.FinishReason
    error: RequestError
    drafted_tokens: int
    accepted_draft_tokens: int
    prompt_logprobs: _common_pb2.PackedLogprobs
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., finished: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PackedLogprobs, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("prompt_tokens", "decode_prefix_len", "prefill_prefix_len", "computed_tokens", "kv_bytes_moved", "kv_bytes_prompt", "decode_queue_s", "prefill_queue_s", "prefill_compute_s", "transfer_s", "plan", "first_decode_step_s", "carried_bytes", "constraint_s", "pulled", "brought_tokens", "rank_tokens")
    class CarriedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PROMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    CARRIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_S_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_TOKENS_FIELD_NUMBER: _ClassVar[int]
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
    plan: _common_pb2.Plan
    first_decode_step_s: float
    carried_bytes: _containers.ScalarMap[str, int]
    constraint_s: float
    pulled: _common_pb2.Pulled
    brought_tokens: int
    rank_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., decode_prefix_len: _Optional[int] = ..., prefill_prefix_len: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., kv_bytes_prompt: _Optional[int] = ..., decode_queue_s: _Optional[float] = ..., prefill_queue_s: _Optional[float] = ..., prefill_compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., plan: _Optional[_Union[_common_pb2.Plan, str]] = ..., first_decode_step_s: _Optional[float] = ..., carried_bytes: _Optional[_Mapping[str, int]] = ..., constraint_s: _Optional[float] = ..., pulled: _Optional[_Union[_common_pb2.Pulled, _Mapping]] = ..., brought_tokens: _Optional[int] = ..., rank_tokens: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("code", "message", "peer_failed", "leaves")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    peer_failed: bool
    leaves: bool
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., peer_failed: _Optional[bool] = ..., leaves: _Optional[bool] = ...) -> None: ...
