from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HitKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HIT_KIND_UNSPECIFIED: _ClassVar[HitKind]
    HIT_KIND_NONE: _ClassVar[HitKind]
    HIT_KIND_PARTIAL: _ClassVar[HitKind]
    HIT_KIND_FULL: _ClassVar[HitKind]
HIT_KIND_UNSPECIFIED: HitKind
HIT_KIND_NONE: HitKind
HIT_KIND_PARTIAL: HitKind
HIT_KIND_FULL: HitKind

class DescribeRanksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRanksResponse(_message.Message):
    __slots__ = ("ranks", "engine_topology")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[EngineRank]
    engine_topology: bytes
    def __init__(self, ranks: _Optional[_Iterable[_Union[EngineRank, _Mapping]]] = ..., engine_topology: _Optional[bytes] = ...) -> None: ...

class EngineRank(_message.Message):
    __slots__ = ("rank", "tp_rank", "cp_rank", "pp_rank", "endpoint")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    CP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    rank: _common_pb2.RankId
    tp_rank: int
    cp_rank: int
    pp_rank: int
    endpoint: str
    def __init__(self, rank: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., tp_rank: _Optional[int] = ..., cp_rank: _Optional[int] = ..., pp_rank: _Optional[int] = ..., endpoint: _Optional[str] = ...) -> None: ...

class HandshakeMessage(_message.Message):
    __slots__ = ("hello", "ticket", "status", "abort", "abort_ack", "renew", "pull_request", "pull_grant")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ABORT_ACK_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    PULL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PULL_GRANT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ticket: KvTicket
    status: Status
    abort: Abort
    abort_ack: AbortAck
    renew: RenewLease
    pull_request: PullRequest
    pull_grant: PullGrant
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ticket: _Optional[_Union[KvTicket, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., abort_ack: _Optional[_Union[AbortAck, _Mapping]] = ..., renew: _Optional[_Union[RenewLease, _Mapping]] = ..., pull_request: _Optional[_Union[PullRequest, _Mapping]] = ..., pull_grant: _Optional[_Union[PullGrant, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "rank", "layout", "agent_metadata", "memory", "transport", "monotonic_s", "tp_rank", "engine_memory", "writer_rank", "carried_memory", "draft_memory")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_S_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WRITER_RANK_FIELD_NUMBER: _ClassVar[int]
    CARRIED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MEMORY_FIELD_NUMBER: _ClassVar[int]
    version: int
    rank: _common_pb2.RankId
    layout: KvLayout
    agent_metadata: bytes
    memory: PoolMemory
    transport: str
    monotonic_s: float
    tp_rank: int
    engine_memory: EngineMemory
    writer_rank: int
    carried_memory: _containers.RepeatedCompositeFieldContainer[PoolMemory]
    draft_memory: PoolMemory
    def __init__(self, version: _Optional[int] = ..., rank: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., memory: _Optional[_Union[PoolMemory, _Mapping]] = ..., transport: _Optional[str] = ..., monotonic_s: _Optional[float] = ..., tp_rank: _Optional[int] = ..., engine_memory: _Optional[_Union[EngineMemory, _Mapping]] = ..., writer_rank: _Optional[int] = ..., carried_memory: _Optional[_Iterable[_Union[PoolMemory, _Mapping]]] = ..., draft_memory: _Optional[_Union[PoolMemory, _Mapping]] = ...) -> None: ...

class EngineMemory(_message.Message):
    __slots__ = ("agent_name", "kv", "kv_layer_ids", "aux_addresses", "device_id", "tp_size", "engine_rank", "opaque")
    class OpaqueEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    KV_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    AUX_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RANK_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    agent_name: str
    kv: _containers.RepeatedCompositeFieldContainer[MemoryRegion]
    kv_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    aux_addresses: _containers.RepeatedScalarFieldContainer[int]
    device_id: int
    tp_size: int
    engine_rank: int
    opaque: _containers.ScalarMap[int, bytes]
    def __init__(self, agent_name: _Optional[str] = ..., kv: _Optional[_Iterable[_Union[MemoryRegion, _Mapping]]] = ..., kv_layer_ids: _Optional[_Iterable[int]] = ..., aux_addresses: _Optional[_Iterable[int]] = ..., device_id: _Optional[int] = ..., tp_size: _Optional[int] = ..., engine_rank: _Optional[int] = ..., opaque: _Optional[_Mapping[int, bytes]] = ...) -> None: ...

class MemoryRegion(_message.Message):
    __slots__ = ("address", "page_bytes", "kind")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    address: int
    page_bytes: int
    kind: str
    def __init__(self, address: _Optional[int] = ..., page_bytes: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("page_size", "page_bytes", "model_fingerprint", "tp_size", "groups", "draft")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_bytes: int
    model_fingerprint: int
    tp_size: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    draft: DraftKv
    def __init__(self, page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., model_fingerprint: _Optional[int] = ..., tp_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., draft: _Optional[_Union[DraftKv, _Mapping]] = ...) -> None: ...

class DraftKv(_message.Message):
    __slots__ = ("model_fingerprint", "group")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: int
    group: KvGroup
    def __init__(self, model_fingerprint: _Optional[int] = ..., group: _Optional[_Union[KvGroup, _Mapping]] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("kind", "layer_ids", "num_kv_heads", "head_dim", "dtype", "v_head_dim", "window", "unit_bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[KvGroup.Kind]
        KIND_FULL_ATTENTION: _ClassVar[KvGroup.Kind]
        KIND_SLIDING_WINDOW: _ClassVar[KvGroup.Kind]
        KIND_RECURRENT: _ClassVar[KvGroup.Kind]
        KIND_CHUNKED_WINDOW: _ClassVar[KvGroup.Kind]
    KIND_UNSPECIFIED: KvGroup.Kind
    KIND_FULL_ATTENTION: KvGroup.Kind
    KIND_SLIDING_WINDOW: KvGroup.Kind
    KIND_RECURRENT: KvGroup.Kind
    KIND_CHUNKED_WINDOW: KvGroup.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    V_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: KvGroup.Kind
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    num_kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int
    window: int
    unit_bytes: int
    def __init__(self, kind: _Optional[_Union[KvGroup.Kind, str]] = ..., layer_ids: _Optional[_Iterable[int]] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., v_head_dim: _Optional[int] = ..., window: _Optional[int] = ..., unit_bytes: _Optional[int] = ...) -> None: ...

class PoolMemory(_message.Message):
    __slots__ = ("base_address", "num_pages", "kind", "device_id")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    num_pages: int
    kind: str
    device_id: int
    def __init__(self, base_address: _Optional[int] = ..., num_pages: _Optional[int] = ..., kind: _Optional[str] = ..., device_id: _Optional[int] = ...) -> None: ...

class PageRun(_message.Message):
    __slots__ = ("first_page", "num_pages")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    num_pages: int
    def __init__(self, first_page: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class KvTicket(_message.Message):
    __slots__ = ("room", "prefill_generation", "prompt_len", "decode_prefix_len", "runs", "aux_slot", "write_until_s", "tickets_of_room", "no_pages", "engine_state", "want_digests", "targets")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    AUX_SLOT_FIELD_NUMBER: _ClassVar[int]
    WRITE_UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    TICKETS_OF_ROOM_FIELD_NUMBER: _ClassVar[int]
    NO_PAGES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STATE_FIELD_NUMBER: _ClassVar[int]
    WANT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    room: int
    prefill_generation: int
    prompt_len: int
    decode_prefix_len: int
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    aux_slot: int
    write_until_s: float
    tickets_of_room: int
    no_pages: bool
    engine_state: bytes
    want_digests: bool
    targets: _containers.RepeatedCompositeFieldContainer[GroupTarget]
    def __init__(self, room: _Optional[int] = ..., prefill_generation: _Optional[int] = ..., prompt_len: _Optional[int] = ..., decode_prefix_len: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ..., aux_slot: _Optional[int] = ..., write_until_s: _Optional[float] = ..., tickets_of_room: _Optional[int] = ..., no_pages: _Optional[bool] = ..., engine_state: _Optional[bytes] = ..., want_digests: _Optional[bool] = ..., targets: _Optional[_Iterable[_Union[GroupTarget, _Mapping]]] = ...) -> None: ...

class GroupTarget(_message.Message):
    __slots__ = ("group", "start_token", "runs")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    group: int
    start_token: int
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    def __init__(self, group: _Optional[int] = ..., start_token: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("room", "holder_generation", "cache_salt", "token_ids", "have", "least_end", "keep_until_s")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    HOLDER_GENERATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    LEAST_END_FIELD_NUMBER: _ClassVar[int]
    KEEP_UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    room: int
    holder_generation: int
    cache_salt: str
    token_ids: bytes
    have: int
    least_end: int
    keep_until_s: float
    def __init__(self, room: _Optional[int] = ..., holder_generation: _Optional[int] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., have: _Optional[int] = ..., least_end: _Optional[int] = ..., keep_until_s: _Optional[float] = ...) -> None: ...

class PullGrant(_message.Message):
    __slots__ = ("room", "end", "with_draft")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WITH_DRAFT_FIELD_NUMBER: _ClassVar[int]
    room: int
    end: int
    with_draft: bool
    def __init__(self, room: _Optional[int] = ..., end: _Optional[int] = ..., with_draft: _Optional[bool] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ("room", "write_until_s")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    WRITE_UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    room: int
    write_until_s: float
    def __init__(self, room: _Optional[int] = ..., write_until_s: _Optional[float] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("room", "state", "reason", "start", "bytes_moved", "hit", "descriptors", "page_digests", "unsettled", "group_bytes", "held_tokens")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Status.State]
        STATE_ACCEPTED: _ClassVar[Status.State]
        STATE_REFUSED: _ClassVar[Status.State]
        STATE_RENEGOTIATE: _ClassVar[Status.State]
        STATE_LANDED: _ClassVar[Status.State]
        STATE_FAILED: _ClassVar[Status.State]
    STATE_UNSPECIFIED: Status.State
    STATE_ACCEPTED: Status.State
    STATE_REFUSED: Status.State
    STATE_RENEGOTIATE: Status.State
    STATE_LANDED: Status.State
    STATE_FAILED: Status.State
    ROOM_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    PAGE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    GROUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    room: int
    state: Status.State
    reason: str
    start: int
    bytes_moved: int
    hit: HitKind
    descriptors: int
    page_digests: _containers.RepeatedScalarFieldContainer[int]
    unsettled: bool
    group_bytes: _containers.RepeatedScalarFieldContainer[int]
    held_tokens: int
    def __init__(self, room: _Optional[int] = ..., state: _Optional[_Union[Status.State, str]] = ..., reason: _Optional[str] = ..., start: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., hit: _Optional[_Union[HitKind, str]] = ..., descriptors: _Optional[int] = ..., page_digests: _Optional[_Iterable[int]] = ..., unsettled: _Optional[bool] = ..., group_bytes: _Optional[_Iterable[int]] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("room", "generation")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    room: int
    generation: int
    def __init__(self, room: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class AbortAck(_message.Message):
    __slots__ = ("room", "generation", "unsettled")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    room: int
    generation: int
    unsettled: bool
    def __init__(self, room: _Optional[int] = ..., generation: _Optional[int] = ..., unsettled: _Optional[bool] = ...) -> None: ...
