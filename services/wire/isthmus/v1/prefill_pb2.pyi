from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchLoadRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.RankLoad
    def __init__(self, load: _Optional[_Union[_common_pb2.RankLoad, _Mapping]] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("room", "decode", "prefill")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    room: int
    decode: _common_pb2.RankId
    prefill: _common_pb2.RankId
    def __init__(self, room: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "num_output_ids", "sampling", "cache_salt", "priority", "rendezvous", "eos_token_ids", "traceparent", "pull_from", "share", "adapter", "left_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PULL_FROM_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    num_output_ids: int
    sampling: _common_pb2.SamplingParams
    cache_salt: str
    priority: int
    rendezvous: Rendezvous
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    pull_from: _common_pb2.PullSource
    share: _common_pb2.TenantShare
    adapter: _common_pb2.Adapter
    left_s: float
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., num_output_ids: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., pull_from: _Optional[_Union[_common_pb2.PullSource, _Mapping]] = ..., share: _Optional[_Union[_common_pb2.TenantShare, _Mapping]] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ..., left_s: _Optional[float] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token_id", "first_token_logprobs", "prefill_prefix_len", "computed_tokens", "kv_bytes_moved", "queue_s", "compute_s", "prompt_logprobs", "pulled", "brought_tokens", "draft_tokens", "rank_tokens")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    first_token_logprobs: _common_pb2.TokenLogprobs
    prefill_prefix_len: int
    computed_tokens: int
    kv_bytes_moved: int
    queue_s: float
    compute_s: float
    prompt_logprobs: _common_pb2.PackedLogprobs
    pulled: _common_pb2.Pulled
    brought_tokens: int
    draft_tokens: int
    rank_tokens: int
    def __init__(self, first_token_id: _Optional[int] = ..., first_token_logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., prefill_prefix_len: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PackedLogprobs, _Mapping]] = ..., pulled: _Optional[_Union[_common_pb2.Pulled, _Mapping]] = ..., brought_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., rank_tokens: _Optional[int] = ...) -> None: ...
