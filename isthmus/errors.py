"""Calls raise these errors, named by what the caller can do next; each carries the router's own sentence."""

from collections.abc import Mapping

import grpc

_ERROR_KEY = "isthmus-error"  # It is trailing metadata: the router's own name for what it raised.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"  # It is gRPC's, and says when to come again.


class IsthmusError(Exception):
    """All errors of this package are of this class. `code` is gRPC's, None where no call failed;
    `retry_after_s` is what the router requested, None where it did not say."""

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
    """The prompt is longer than any context there; make it shorter."""


class Unauthenticated(IsthmusError):
    """The router asks for an API key, and this one is none of its."""


class Forbidden(IsthmusError):
    """The API key is not good for this."""


class NotFound(IsthmusError):
    """The request names what does not exist, a model for one."""


class AlreadyRunning(IsthmusError):
    """A request of this id is running."""


class Overloaded(IsthmusError):
    """The cluster is full; come again later."""


class Unavailable(IsthmusError):
    """The router cannot be reached, or no rank can take the request; come again later."""


class DeadlineExceeded(IsthmusError):
    """The call's time is over."""


class Cancelled(IsthmusError):
    """The call was ended from this side, by `close` for one."""


class NotSupported(IsthmusError):
    """This router does not know such a call: it is of another version."""


class ServerFailed(IsthmusError):
    """The router failed in a way that it did not foresee; its log has more."""


class IncompleteAnswer(IsthmusError):
    """The answer ended before it was what had been requested."""


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
    """Return what a failed call of gRPC's says, the blocking or the asynchronous one's."""
    code, details = error.code(), error.details() or ""
    metadata = dict(error.trailing_metadata() or ())
    cls = _BY_STATUS.get(code, ServerFailed)
    if metadata.get(_ERROR_KEY) == ContextExceeded.__name__:
        cls = ContextExceeded
    # It is gRPC's own sentence; waiting makes it no smaller.
    if cls is Overloaded and "larger than max" in details:
        cls = InvalidRequest
    return cls(details or code.name, code, _pushback_s(metadata.get(_PUSHBACK_KEY)))


def _pushback_s(text: str | bytes | None) -> float | None:
    """Return the seconds to wait by gRPC's A6: what is no number, or is negative, says that one should not
    come again."""
    if text is None:
        return None
    try:
        milliseconds = int(text)
    except ValueError:
        milliseconds = -1
    return milliseconds / 1e3 if milliseconds >= 0 else float("inf")
