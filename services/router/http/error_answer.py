"""Errors are answered in the words of the API that was asked."""

import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.dialects.anthropic import anthropic_errors as anthropic
from services.router.dialects.http_statuses import UnknownEncoding, status_of
from services.router.dialects.openai import openai_errors as openai
from services.router.http.encodings import ENCODINGS
from services.router.http.paths import CHATS, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from services.values.errors import IsthmusError, NoCapacity, Unauthenticated, let_frames_go

# Bodies call the prompt so.
_PROMPTS = {CHATS: "messages", COMPLETIONS: "prompt", RESPONSES: openai.RESPONSES_PROMPT, GENERATE: "text"}


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error. A bug keeps its frames, which Starlette has yet to log."""
    if isinstance(error, IsthmusError):
        let_frames_go(error)
    path = request.url.path
    body = (
        anthropic.error_json(error)
        if _is_anthropics(path)
        else openai.error_json(error, _PROMPTS.get(path, "prompt"))
    )
    return JSONResponse(body, status_code=status_of(error), headers=headers_of(error))


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    body = (
        anthropic.error_object(error.detail, status)
        if _is_anthropics(request.url.path)
        else openai.error_object(error.detail, status, None, status)
    )
    return JSONResponse(body, status_code=status, headers=error.headers)


def _is_anthropics(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}  # Every 401 has it (RFC 9110, 11.6.1).
    if isinstance(error, UnknownEncoding):
        return {"Accept-Encoding": ", ".join(ENCODINGS)}  # RFC 9110, 15.5.16 asks for it.
    wait_s = error.retry_after_s if isinstance(error, NoCapacity) else None
    return {} if wait_s is None else {"Retry-After": str(math.ceil(wait_s))}
