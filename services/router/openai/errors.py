"""Errors as OpenAI's clients read them: status, type, code, and the parameter that is wrong."""

import math
import re
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.openai.answer import Json
from services.router.openai.request import InvalidParameter
from services.values.errors import (
    Aborted,
    AlreadyRunning,
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    NotFound,
    PeerFailed,
    StaleGeneration,
    Unauthenticated,
    Unavailable,
)

CHATS_PATH = "/v1/chat/completions"
_CLIENT_CLOSED_REQUEST = 499  # nginx's; no RFC has one


class BodyTooLong(InvalidRequest):
    """Nothing of it is read any more."""


class TooSlow(InvalidRequest):
    """It did not come in time."""


class ConnectionsFull(NoCapacity):
    """There are too many connections, whatever is asked for on this one."""


_STATUSES: Mapping[type[Exception], tuple[int, str]] = {
    BodyTooLong: (413, "invalid_request_error"),
    TooSlow: (408, "invalid_request_error"),
    ConnectionsFull: (503, "unavailable_error"),
    InvalidRequest: (400, "invalid_request_error"),
    Unauthenticated: (401, "invalid_request_error"),
    NotFound: (404, "invalid_request_error"),
    AlreadyRunning: (409, "invalid_request_error"),
    NoCapacity: (429, "rate_limit_error"),
    Aborted: (_CLIENT_CLOSED_REQUEST, "aborted_error"),
    Unavailable: (503, "unavailable_error"),
    PeerFailed: (503, "unavailable_error"),
    StaleGeneration: (503, "unavailable_error"),
    DeadlineExceeded: (504, "timeout_error"),
}
# Of the classes that OpenAI has a word for; the code of all others is their status.
_CODES: Mapping[type[Exception], str] = {
    ContextExceeded: "context_length_exceeded",
    Unauthenticated: "invalid_api_key",
}
# How the gRPC API's field names begin where the HTTP parameter's do not.
_FIELD = re.compile(r"(?:sampling\.|chat\.)(?P<param>[\w.\[\]]+)|(?P<prompt>prompt|text|token_ids\.ids)\b")


async def answer_error(request: Request, error: Exception) -> Response:
    body = error_json(error, "messages" if request.url.path == CHATS_PATH else "prompt")
    return JSONResponse(body, status_code=status_of(error), headers=headers_of(error))


def headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}  # RFC 9110, 11.6.1: every 401 has it
    wait_s = error.retry_after_s if isinstance(error, NoCapacity) else None
    return {} if wait_s is None else {"Retry-After": str(math.ceil(wait_s))}


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = _error_object(error.detail, "invalid_request_error", None, error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def error_json(error: Exception, prompt_param: str = "prompt") -> Json:
    """`prompt_param`: what this request's body calls the prompt."""
    status, error_type = _status(error)
    # What we did not raise on purpose is for the log, not for the client.
    message = str(error) if isinstance(error, IsthmusError) else "internal error"
    return _error_object(message, error_type, _param(error, prompt_param), _CODES.get(type(error), status))


def _error_object(message: str, error_type: str, param: str | None, code: int | str) -> Json:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def status_of(error: Exception) -> int:
    return _status(error)[0]


def _status(error: Exception) -> tuple[int, str]:
    for error_class in type(error).__mro__:
        if error_class in _STATUSES:
            return _STATUSES[error_class]
    return 500, "internal_error"


def _param(error: Exception, prompt_param: str) -> str | None:
    """The parameter that an InvalidRequest's message begins with, in this API's words."""
    if isinstance(error, ContextExceeded):
        return prompt_param
    if isinstance(error, InvalidParameter):
        return error.param
    field = _FIELD.match(str(error)) if isinstance(error, InvalidRequest) else None
    return field and (field["param"] or "prompt")
