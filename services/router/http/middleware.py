"""Middleware checks the framing of bodies, the keys and the request ids before the routes. Errors are
formatted for the API that the path belongs to."""

import math
import secrets
from collections.abc import Callable
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.api_keys import ApiKeys
from services.router.callers import ANYBODY, calling
from services.router.dialects import http_errors
from services.router.dialects import messages_answer as anthropic
from services.router.dialects.dialect import REQUEST_ID, TENANT
from services.router.dialects.http_errors import UnknownEncoding, status_of
from services.router.http.body_reader import ENCODINGS
from services.values.errors import (
    Forbidden,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    Unauthenticated,
    let_frames_go,
)
from services.values.request import MAX_ID_CHARS, is_id

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"
HEALTH = "/health"


# These are the names of the prompt in the bodies.
_PROMPTS = {
    CHATS: "messages",
    COMPLETIONS: "prompt",
    RESPONSES: http_errors.RESPONSES_PROMPT,
    GENERATE: "text",
}


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the response for an error. A bug keeps its frames, which Starlette still has to log."""
    if isinstance(error, IsthmusError):
        let_frames_go(error)
    path = request.url.path
    body = (
        anthropic.error_json(error)
        if _is_anthropics(path)
        else http_errors.error_json(error, _PROMPTS.get(path, "prompt"))
    )
    return JSONResponse(body, status_code=status_of(error), headers=headers_of(error))


async def answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    body = (
        anthropic.error_object(error.detail, status)
        if _is_anthropics(request.url.path)
        else http_errors.error_object(error.detail, status, None, status)
    )
    return JSONResponse(body, status_code=status, headers=error.headers)


def _is_anthropics(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def headers_of(error: Exception) -> dict[str, str]:
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}  # RFC 9110, 11.6.1 requires this for every 401.
    if isinstance(error, UnknownEncoding):
        return {"Accept-Encoding": ", ".join(ENCODINGS)}  # RFC 9110, 15.5.16 recommends this.
    wait_s = error.retry_after_s if isinstance(error, NoCapacity) else None
    return {} if wait_s is None else {"Retry-After": str(math.ceil(wait_s))}


class OneLength:
    """This ASGI middleware refuses a request with both Content-Length and Transfer-Encoding, and closes its
    connection. A proxy that follows the one while we follow the other would let a body pass as another
    client's request (RFC 9112, 6.1 and 11.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if not {b"content-length", b"transfer-encoding"} <= names:
            await self._app(scope, receive, send)
            return
        error = InvalidRequest("a request must not have both Content-Length and Transfer-Encoding")
        answer = await answer_error(Request(scope), error)
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)


_NOBODY = "\0"  # No tenant has that name.


class HttpDoor:
    """This requires a key, except for `open_paths`. The app reads the caller from `callers.current`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        shown = _key_of(Headers(scope=scope))
        try:
            caller = self._keys.check(shown)
        except Unauthenticated as error:
            self._keys.refusals.note("http", _peer_of(scope), error)
            answer = await answer_error(Request(scope), error)
            await answer(scope, receive, send)
            return
        with calling(caller, partial(self._keys.is_good, shown, caller)):
            await self._app(scope, receive, send)


def tenant_of(keys: ApiKeys | None, headers: Headers) -> str:
    """Return the request's tenant by its key and header. With a key of no tenant the body may still name one.
    A request that will be refused gets a name that no tenant has."""
    try:
        caller = ANYBODY if keys is None else keys.check(_key_of(headers))
        return caller.tenant_of(headers.get(TENANT, ""))
    except (Unauthenticated, Forbidden):
        return _NOBODY


def _key_of(headers: Headers) -> str | None:
    own = headers.get("x-api-key")
    return headers.get("authorization") or (None if own is None else f"Bearer {own}")


def _peer_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "-"


_SUFFIX_BYTES = 3


class RequestIds:
    """This ASGI middleware uses the client's own request id where possible, and reports the id with every
    answer.

        x-request-id: a    no request of the tenant has it  -> a
                           a request of the tenant has it   -> a-1f6e02   Proxies repeat a trace's id.
                           absent, or no valid id           -> random

    Tenants have separate ids and learn nothing about each other's. Over gRPC a second request with a running
    request's id is an error (ALREADY_EXISTS). The app reads the id from the request's header.
    """

    def __init__(
        self, app: ASGIApp, is_running: Callable[[str, str], bool], tenant_of: Callable[[Headers], str]
    ) -> None:
        """`is_running` returns whether a request of the tenant from another front end has the id. `tenant_of`
        returns the request's tenant as far as the headers name it."""
        self._app = app
        self._is_running = is_running
        self._tenant_of = tenant_of
        self._used: set[tuple[str, str]] = set()  # Running requests use these ids.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = self._tenant_of(headers)
        request_id = self._unused(tenant, headers.get(REQUEST_ID, ""))
        header = (REQUEST_ID.encode(), request_id.encode("latin-1"))
        others = [(name, value) for name, value in scope["headers"] if name != header[0]]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        self._used.add((tenant, request_id))
        try:
            await self._app({**scope, "headers": [*others, header]}, receive, send_with_id)
        finally:
            self._used.remove((tenant, request_id))

    def _unused(self, tenant: str, given: str) -> str:
        if not given or not is_id(given):
            return secrets.token_hex(8)
        request_id = given
        while (tenant, request_id) in self._used or self._is_running(tenant, request_id):
            suffix = "-" + secrets.token_hex(_SUFFIX_BYTES)
            request_id = given[: MAX_ID_CHARS - len(suffix)] + suffix
        return request_id
