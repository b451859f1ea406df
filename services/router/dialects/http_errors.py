"""Each error has one HTTP status in all APIs.

The APIs but Anthropic's report an error as OpenAI does: with a type, a code, and the parameter that is wrong.
"""

from collections.abc import Mapping

from services.router.dialects.dialect import Json
from services.router.dialects.json_body import InvalidParameter
from services.values.errors import (
    Aborted,
    AlreadyRunning,
    ContextExceeded,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    NotFound,
    OverLimit,
    PeerFailed,
    StaleGeneration,
    Unauthenticated,
    Unavailable,
)

_CLIENT_CLOSED_REQUEST = 499  # This status is nginx's; no RFC defines it.


class BodyTooLong(InvalidRequest):
    pass


class UnknownEncoding(InvalidRequest):
    pass


class TooSlow(InvalidRequest):
    pass


class ConnectionsFull(NoCapacity):
    pass


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


# A status below 500 that is not here is the request's fault.
_TYPES: Mapping[int, str] = {
    429: "rate_limit_error",
    499: "aborted_error",
    500: "internal_error",
    503: "unavailable_error",
    504: "timeout_error",
}
# OpenAI has a code for these classes; all others have their status as the code.
_CODES: Mapping[type[Exception], str] = {
    ContextExceeded: "context_length_exceeded",
    Unauthenticated: "invalid_api_key",
    OverLimit: "rate_limit_exceeded",
}
RESPONSES_PROMPT = "input"


def error_json(error: Exception, prompt_param: str = "prompt") -> Json:
    """Return OpenAI's error object. `prompt_param` is the name of the prompt in this request's body."""
    status = status_of(error)
    # An error that we did not raise on purpose is for the log, not for the client.
    message = str(error) if isinstance(error, IsthmusError) else "internal error"
    return error_object(message, status, _param(error, prompt_param), _CODES.get(type(error), status))


def error_object(message: str, status: int, param: str | None, code: int | str) -> Json:
    error_type = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _param(error: Exception, prompt_param: str) -> str | None:
    if isinstance(error, ContextExceeded):
        return prompt_param
    if isinstance(error, InvalidParameter):
        return error.param
    field = error.field if isinstance(error, InvalidRequest) else ""
    if field.partition("[")[0] in ("prompt", "text", "token_ids.ids"):
        return "prompt"
    if not field.startswith(("sampling.", "chat.")):
        return None
    _, _, param = field.partition(".")
    if prompt_param == RESPONSES_PROMPT:  # The members of its functions are not nested.
        return prompt_param if param.startswith("messages") else param
    return _of_function(param)


def _of_function(param: str) -> str:
    """Return the name in HTTP's body, which nests a function's members, as the message does not."""
    holder, _, member = param.rpartition(".")
    is_function = holder == "tool_choice" or holder.startswith("tools[") or ".tool_calls[" in holder
    return f"{holder}.function.{member}" if is_function and member not in ("id", "mode") else param
