from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("generation", "wait_s", "only_wait", "hand_over_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ONLY_WAIT_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    wait_s: float
    only_wait: bool
    hand_over_s: float
    def __init__(self, generation: _Optional[int] = ..., wait_s: _Optional[float] = ..., only_wait: _Optional[bool] = ..., hand_over_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running", "hand_over")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    running: int
    hand_over: HandOver
    def __init__(self, running: _Optional[int] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("over", "handed_tokens", "handed_bytes", "left_tokens", "successors")
    OVER_FIELD_NUMBER: _ClassVar[int]
    HANDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSORS_FIELD_NUMBER: _ClassVar[int]
    over: bool
    handed_tokens: int
    handed_bytes: int
    left_tokens: int
    successors: int
    def __init__(self, over: _Optional[bool] = ..., handed_tokens: _Optional[int] = ..., handed_bytes: _Optional[int] = ..., left_tokens: _Optional[int] = ..., successors: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("generation", "name", "directory")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    name: str
    directory: str
    def __init__(self, generation: _Optional[int] = ..., name: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _common_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("generation", "name")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    generation: int
    name: str
    def __init__(self, generation: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_common_pb2.Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_common_pb2.Adapter, _Mapping]]] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("generation", "role", "wait_s", "force")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    role: str
    wait_s: float
    force: bool
    def __init__(self, generation: _Optional[int] = ..., role: _Optional[str] = ..., wait_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("generation", "source", "cache_salt", "token_ids", "idle_s", "protected_tokens", "within_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    source: _common_pb2.RankAddress
    cache_salt: str
    token_ids: bytes
    idle_s: float
    protected_tokens: int
    within_s: float
    def __init__(self, generation: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.RankAddress, _Mapping]] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., idle_s: _Optional[float] = ..., protected_tokens: _Optional[int] = ..., within_s: _Optional[float] = ...) -> None: ...

class TakeOverResponse(_message.Message):
    __slots__ = ("held_tokens", "pulled_tokens", "pulled_bytes", "refused", "room_tokens")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ROOM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    pulled_tokens: int
    pulled_bytes: int
    refused: str
    room_tokens: int
    def __init__(self, held_tokens: _Optional[int] = ..., pulled_tokens: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., refused: _Optional[str] = ..., room_tokens: _Optional[int] = ...) -> None: ...
