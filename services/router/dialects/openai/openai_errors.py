"""OpenAI's clients read errors by a type, a code, and the parameter that is wrong."""

from collections.abc import Mapping

from services.router.dialects.dialect_answer import Json
from services.router.dialects.http_statuses import status_of
from services.router.dialects.json_body import InvalidParameter
from services.values.errors import ContextExceeded, InvalidRequest, IsthmusError, Unauthenticated

# What is below 500 and not here is the request's fault.
_TYPES: Mapping[int, str] = {
    429: "rate_limit_error",
    499: "aborted_error",
    500: "internal_error",
    503: "unavailable_error",
    504: "timeout_error",
}
# OpenAI has a word for these classes; the code of all others is their status.
_CODES: Mapping[type[Exception], str] = {
    ContextExceeded: "context_length_exceeded",
    Unauthenticated: "invalid_api_key",
}
RESPONSES_PROMPT = "input"


def error_json(error: Exception, prompt_param: str = "prompt") -> Json:
    """`prompt_param` is what this request's body calls the prompt."""
    status = status_of(error)
    # What we did not raise on purpose is for the log, not for the client.
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
    if prompt_param == RESPONSES_PROMPT:  # Its functions lie flat.
        return prompt_param if param.startswith("messages") else param
    return _of_function(param)


def _of_function(param: str) -> str:
    """Return the name of what gRPC's tools and calls have at hand and HTTP's in an object of their own."""
    holder, _, member = param.rpartition(".")
    is_function = holder == "tool_choice" or holder.startswith("tools[") or ".tool_calls[" in holder
    return f"{holder}.function.{member}" if is_function and member not in ("id", "mode") else param
