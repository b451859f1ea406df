"""Errors are reported here as Anthropic's clients read them."""

from collections.abc import Mapping

from services.router.dialects.dialect_answer import Json
from services.router.dialects.http_statuses import status_of
from services.values.errors import InvalidRequest, IsthmusError

# Their SDKs raise by the status; what is below 500 and not here is the request's fault.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_json(error: Exception) -> Json:
    # What we did not raise on purpose is for the log, not for the client.
    message = str(error) if isinstance(error, IsthmusError) else "internal error"
    if isinstance(error, InvalidRequest) and error.field:  # These are members of the body itself.
        message = message.removeprefix("sampling.").removeprefix("chat.")
    return error_object(message, status_of(error))


def error_object(message: str, status: int) -> Json:
    fallback = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(status, fallback), "message": message}}
