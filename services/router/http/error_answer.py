"""Errors as answers, in the words of the API that was asked."""

import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.dialects.errors import status_of
from services.router.dialects.openai.errors import error_json, error_object
from services.values.errors import NoCapacity, Unauthenticated

CHATS_PATH = "/v1/chat/completions"


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
    body = error_object(error.detail, error.status_code, None, error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)
