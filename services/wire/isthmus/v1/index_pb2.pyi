from . import common_pb2 as _common_pb2
from . import handshake_pb2 as _handshake_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Schema(_message.Message):
    __slots__ = ("version", "index_block", "hash_scheme")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    version: int
    index_block: int
    hash_scheme: str
    def __init__(self, version: _Optional[int] = ..., index_block: _Optional[int] = ..., hash_scheme: _Optional[str] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("role", "address", "layout", "model", "max_context_tokens", "capabilities", "total_pages", "model_path", "engine", "draining", "handshake_version", "model_context_tokens", "adapters", "shared_files")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HANDSHAKE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FILES_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    address: _common_pb2.RankAddress
    layout: _handshake_pb2.KvLayout
    model: str
    max_context_tokens: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    total_pages: int
    model_path: str
    engine: str
    draining: bool
    handshake_version: int
    model_context_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[_common_pb2.Adapter]
    shared_files: str
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., address: _Optional[_Union[_common_pb2.RankAddress, _Mapping]] = ..., layout: _Optional[_Union[_handshake_pb2.KvLayout, _Mapping]] = ..., model: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., total_pages: _Optional[int] = ..., model_path: _Optional[str] = ..., engine: _Optional[str] = ..., draining: _Optional[bool] = ..., handshake_version: _Optional[int] = ..., model_context_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_common_pb2.Adapter, _Mapping]]] = ..., shared_files: _Optional[str] = ...) -> None: ...

class PrefixHead(_message.Message):
    __slots__ = ("generation", "epoch", "base_seq", "snapshot_chunks", "age_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: int
    base_seq: int
    snapshot_chunks: int
    age_s: float
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[int] = ..., base_seq: _Optional[int] = ..., snapshot_chunks: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class PrefixSnapshot(_message.Message):
    __slots__ = ("generation", "epoch", "chunk", "hashes", "resumable", "files")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: int
    chunk: int
    hashes: bytes
    resumable: bytes
    files: bytes
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[int] = ..., chunk: _Optional[int] = ..., hashes: _Optional[bytes] = ..., resumable: _Optional[bytes] = ..., files: _Optional[bytes] = ...) -> None: ...

class PrefixDelta(_message.Message):
    __slots__ = ("generation", "epoch", "seq", "added", "removed", "age_s", "resumable_added", "resumable_removed", "files_added", "files_removed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_ADDED_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_REMOVED_FIELD_NUMBER: _ClassVar[int]
    FILES_ADDED_FIELD_NUMBER: _ClassVar[int]
    FILES_REMOVED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: int
    seq: int
    added: bytes
    removed: bytes
    age_s: float
    resumable_added: bytes
    resumable_removed: bytes
    files_added: bytes
    files_removed: bytes
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., age_s: _Optional[float] = ..., resumable_added: _Optional[bytes] = ..., resumable_removed: _Optional[bytes] = ..., files_added: _Optional[bytes] = ..., files_removed: _Optional[bytes] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("decode", "prefill")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    decode: _common_pb2.RankId
    prefill: _common_pb2.RankId
    def __init__(self, decode: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.RankId, _Mapping]] = ...) -> None: ...
