"""Each error has one HTTP status, whichever API it is reported in."""

from collections.abc import Mapping

from services.values.errors import (
    Aborted,
    AlreadyRunning,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NoCapacity,
    NotFound,
    PeerFailed,
    StaleGeneration,
    Unauthenticated,
    Unavailable,
)

_CLIENT_CLOSED_REQUEST = 499  # It is nginx's; no RFC has one.


class BodyTooLong(InvalidRequest):
    """The body is too long, and nothing of it is read any more."""


class UnknownEncoding(InvalidRequest):
    """The body's Content-Encoding is none that is read here."""


class TooSlow(InvalidRequest):
    """The request did not come in time."""


class ConnectionsFull(NoCapacity):
    """There are too many connections, whatever is requested on this one."""


_STATUSES: Mapping[type[Exception], int] = {
    BodyTooLong: 413,
    UnknownEncoding: 415,
    TooSlow: 408,
    ConnectionsFull: 503,
    InvalidRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    AlreadyRunning: 409,
    NoCapacity: 429,
    Aborted: _CLIENT_CLOSED_REQUEST,
    Unavailable: 503,
    PeerFailed: 503,
    StaleGeneration: 503,
    DeadlineExceeded: 504,
}


def status_of(error: Exception) -> int:
    for error_class in type(error).__mro__:
        if error_class in _STATUSES:
            return _STATUSES[error_class]
    return 500
