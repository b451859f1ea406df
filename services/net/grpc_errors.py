"""This module turns our errors into gRPC status, and back.

handler raises NoCapacity --> guard.py: RESOURCE_EXHAUSTED, the sentence, isthmus-error: NoCapacity
                                ~~~ the wire ~~~
caller inside `renaming()` <-- NoCapacity again; a failure of gRPC itself is named by its code
"""

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import grpc.aio

from services.values.errors import (
    Aborted,
    AlreadyRunning,
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    IsthmusError,
    KvCorrupt,
    NoCapacity,
    NotFound,
    OverLimit,
    PeerFailed,
    ProtocolError,
    RankLeaves,
    StaleGeneration,
    Unauthenticated,
    Unavailable,
)
from services.wire.isthmus.v1 import decode_pb2

ERROR_KEY = "isthmus-error"  # This trailing metadata has the name of the class that was raised.

_STATUS: dict[type[IsthmusError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ContextExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyRunning: grpc.StatusCode.ALREADY_EXISTS,
    NoCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OverLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerFailed: grpc.StatusCode.UNAVAILABLE,
    KvCorrupt: grpc.StatusCode.UNAVAILABLE,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    RankLeaves: grpc.StatusCode.UNAVAILABLE,
    StaleGeneration: grpc.StatusCode.FAILED_PRECONDITION,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Aborted: grpc.StatusCode.CANCELLED,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}
_BY_NAME: dict[str, type[IsthmusError]] = {error.__name__: error for error in _STATUS}
# These classes are for a status without that name: the peer's gRPC library sent it, or another program.
_BY_STATUS: dict[grpc.StatusCode, type[IsthmusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyRunning,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoCapacity,
    grpc.StatusCode.FAILED_PRECONDITION: StaleGeneration,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: BaseException) -> grpc.StatusCode:
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return grpc.StatusCode.INTERNAL


def status_named(name: str) -> grpc.StatusCode:
    return _STATUS[_BY_NAME[name]] if name in _BY_NAME else grpc.StatusCode.INTERNAL


def error_from(error: grpc.aio.AioRpcError) -> IsthmusError:
    details = error.details() or error.code().name
    name = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
    if name in _BY_NAME:
        return _received(_BY_NAME[name], details)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return InvalidRequest(f"the message is too large: {details}")
    return _received(_BY_STATUS.get(error.code(), PeerFailed), details)


def _received(kind: type[IsthmusError], details: str) -> IsthmusError:
    return InvalidRequest.received(details) if kind is InvalidRequest else kind(details)


def heed_cancellation() -> None:
    """Raise CancelledError if this task was cancelled in the meantime; call it after a call has failed.

    grpc.aio loses a cancellation that coincides with the failure of a call, because it waits for its own
    tasks, which swallow it. A caller that then retries would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@contextlib.contextmanager
def renaming() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        heed_cancellation()
        raise error_from(error) from error


def error_from_request(pb: decode_pb2.RequestError) -> IsthmusError:
    """Return the error that a RequestError on the Attach stream stands for.

    PeerFailed means that another prefill rank may work, Unavailable that this decode rank failed, and
    RankLeaves that it leaves.
    """
    if pb.peer_failed:
        return PeerFailed(pb.message)
    if pb.leaves:
        return RankLeaves(pb.message)
    code = _CODES.get(pb.code, grpc.StatusCode.UNKNOWN)
    return _received(_BY_STATUS.get(code, Unavailable), pb.message)
