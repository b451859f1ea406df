"""These errors are named by what the caller can do next; each has the router's own message."""

from collections.abc import Mapping

import grpc

_ERROR_KEY = "isthmus-error"  # This trailing metadata has the router's own name of the error.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"  # This is gRPC's name for the delay before a retry.


class IsthmusError(Exception):
    """All errors of this package derive from this class.

    `code` is gRPC's status, or None if no call failed. `retry_after_s` is the delay that the router
    requested, or None.
    """

    def __init__(
        self,
        message: str = "",
        code: grpc.StatusCode | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(IsthmusError):
    """The request can never work; the message names the field."""


class ContextExceeded(InvalidRequest):
    """The prompt is longer than any context of the model's ranks; make it shorter."""


class Unauthenticated(IsthmusError):
    """The router requires an API key, and does not know this one."""


class Forbidden(IsthmusError):
    """The API key does not allow this call."""


class NotFound(IsthmusError):
    """The request names something that does not exist, such as a model."""


class AlreadyRunning(IsthmusError):
    """A request with this id is running."""


class Overloaded(IsthmusError):
    """The cluster is full; try again later."""


class Unavailable(IsthmusError):
    """The router cannot be reached, or no rank can accept the request; try again later."""


class DeadlineExceeded(IsthmusError):
    """The call's time is over."""


class Cancelled(IsthmusError):
    """The client ended the call, for example by `close`."""


class NotSupported(IsthmusError):
    """The router does not know this call, because it has another version."""


class ServerFailed(IsthmusError):
    """The router failed in an unexpected way; its log has more."""


class IncompleteAnswer(IsthmusError):
    """The answer ended before it was complete."""


_BY_STATUS: Mapping[grpc.StatusCode, type[IsthmusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyRunning,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: NotSupported,
}


def error_from(error: grpc.RpcError) -> IsthmusError:
    """Return our error for a failed gRPC call, blocking or asynchronous."""
    code, details = error.code(), error.details() or ""
    metadata = dict(error.trailing_metadata() or ())
    cls = _BY_STATUS.get(code, ServerFailed)
    if metadata.get(_ERROR_KEY) == ContextExceeded.__name__:
        cls = ContextExceeded
    # This is gRPC's own message; the request does not get smaller by waiting.
    if cls is Overloaded and "larger than max" in details:
        cls = InvalidRequest
    return cls(details or code.name, code, _pushback_s(metadata.get(_PUSHBACK_KEY)))


def _pushback_s(text: str | bytes | None) -> float | None:
    """Return the seconds to wait by gRPC's proposal A6: a negative value, or one that is no number, forbids a
    retry.
    """
    if text is None:
        return None
    try:
        milliseconds = int(text)
    except ValueError:
        milliseconds = -1
    return milliseconds / 1e3 if milliseconds >= 0 else float("inf")
