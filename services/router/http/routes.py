"""The HTTP APIs over the same generation as the gRPC one.

One call, whichever way it ends:

    body -> GenerationCall -> backend.generate() ---> JSON, or server-sent events
                                    |
                                    +-- closed at the end, on an error, and when the client leaves

The status of a stream is decided by its first response; an error after that is an event of its own, and no
[DONE] follows it.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.router.dialects.answer import Json
from services.router.dialects.call import REQUEST_ID, GenerationCall
from services.router.dialects.errors import BodyTooLong
from services.router.dialects.openai.answer import OpenAiAnswer
from services.router.dialects.openai.chat_call import read_chat_call
from services.router.dialects.openai.chat_format import ChatFormat
from services.router.dialects.openai.choice import AnswerFormat, TokenBytes, TokenText
from services.router.dialects.openai.completion_call import read_completion_call
from services.router.dialects.openai.completion_format import CompletionFormat
from services.router.dialects.sampling_defaults import OPENAI, SamplingDefaults
from services.router.http.answering import events, whole
from services.router.http.error_answer import CHATS_PATH, answer_error, answer_http_error
from services.router.http.event_stream import ClientLeft, EventStream, until_disconnect
from services.router.http.framing import OneLength
from services.router.http.key_door import HttpDoor
from services.router.http.request_id import RequestIds
from services.router.keys.api_keys import ApiKeys
from services.values.errors import (
    InvalidRequest,
    IsthmusError,
    NotFound,
)
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse, ListModelsResponse

_ReadCall = Callable[[Mapping[str, object], Mapping[str, str], SamplingDefaults], GenerationCall]

_HEALTH_PATH = "/health"
_TIMEOUT_HEADER = "x-isthmus-timeout-s"
_LONG_BODY = 64 << 10  # bytes; reading a longer one would be felt by every stream on the loop


class GenerationBackend(Protocol):
    """What these APIs need of the router; the gRPC API serves the same."""

    def generate(
        self, request: GenerateRequest, timeout_s: float | None, traceparent: str
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Responses as in generation.proto; the last one carries `finish`. Closing it aborts the request.

        `timeout_s` and `traceparent` are the client's, or None and "".

        Raises:
            IsthmusError: any of services/values/errors.py, at the first response or at a later one.
        """

    def time_limit_s(self, timeout_s: float | None) -> float:
        """In which a call with that `timeout_s` is over, with a moment for its last word."""

    def rejected(self, error: IsthmusError) -> None:
        """Told of each request that cannot be read, for it never comes to `generate`."""

    async def list_models(self) -> ListModelsResponse: ...

    def check_usable(self) -> None:
        """Raises Unavailable, saying why, while no rank could take any request."""

    def is_running(self, request_id: str) -> bool: ...

    def token_text(self, token_id: int) -> str:
        """The text of one token, for log-probabilities."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Of a token that is a part of a character, which its text cannot tell. None: not known."""


def http_app(
    generation: GenerationBackend,
    *,
    defaults: SamplingDefaults = OPENAI,
    keys: ApiKeys | None = None,
    allowed_origins: Sequence[str] = (),
    max_body_bytes: int = 8 << 20,
    clock: Callable[[], float] = time.time,
) -> ASGIApp:
    """The ASGI app; without `keys` it serves anybody.

    `clock` gives seconds since the epoch, for the `created` fields.
    """
    api = _Api(generation, defaults, max_body_bytes, clock)
    routes = [
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{id:path}", api.model, methods=["GET"]),  # some have slashes
        Route(CHATS_PATH, api.chat_completions, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route(_HEALTH_PATH, api.health, methods=["GET"]),
    ]
    handlers = {IsthmusError: answer_error, HTTPException: answer_http_error, Exception: answer_error}
    app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
    # Around all of it: Starlette answers what is a bug outside of any middleware of its own.
    if keys is not None:
        app = HttpDoor(app, keys, open_paths=frozenset({_HEALTH_PATH}))
    if allowed_origins:  # outside of the door: a browser asks beforehand, and shows no key then
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "Retry-After"),
        )
    return RequestIds(OneLength(app), generation.is_running)


class _Api:
    def __init__(
        self,
        generation: GenerationBackend,
        defaults: SamplingDefaults,
        max_body_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._generation = generation
        self._defaults = defaults
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._created = int(clock())  # of the models: when this router came up

    async def health(self, request: Request) -> Response:
        """200 while a request could be taken, though it had to wait; else 503, and why."""
        self._generation.check_usable()
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self._models()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if not name:
            return await self.models(request)
        for model in await self._models():
            if model["id"] == name:
                return JSONResponse(model)
        raise NotFound(f"model {name!r} is not served here")

    async def _models(self) -> list[Json]:
        return [
            {
                "id": model.id,
                "object": "model",
                "created": self._created,
                "owned_by": "isthmus",
                "max_model_len": model.max_context_tokens,
            }
            for model in (await self._generation.list_models()).models
        ]

    async def chat_completions(self, request: Request) -> Response:
        return await self._complete(request, read_chat_call, ChatFormat)

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, read_completion_call, CompletionFormat)

    async def _complete(
        self,
        request: Request,
        read_call: _ReadCall,
        answer_format: Callable[[TokenText, TokenBytes], AnswerFormat],
    ) -> Response:
        try:
            timeout_s = _timeout_s(request.headers)
            call = await self._read(request, read_call)
        except InvalidRequest as error:
            self._generation.rejected(InvalidRequest(str(error)))  # by the name that all fronts count it by
            raise
        answer = OpenAiAnswer(
            call,
            answer_format(self._generation.token_text, self._generation.token_bytes),
            model=call.request.model or await self._only_model(),
            created=int(self._clock()),
        )
        responses = self._generation.generate(call.request, timeout_s, call.traceparent)
        if call.stream:
            return EventStream(events(answer, responses), self._generation.time_limit_s(timeout_s))
        return JSONResponse(await until_disconnect(request.receive, whole(answer, responses)))

    async def _read(self, request: Request, read_call: _ReadCall) -> GenerationCall:
        body = await _read_body(request, self._max_body_bytes)

        def read() -> GenerationCall:
            return read_call(_fields_of(body), request.headers, self._defaults)

        return read() if len(body) < _LONG_BODY else await asyncio.to_thread(read)

    async def _only_model(self) -> str:
        models = (await self._generation.list_models()).models
        return models[0].id if models else ""


async def _read_body(request: Request, max_body_bytes: int) -> bytearray:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_body_bytes:
                raise BodyTooLong(f"the body must be at most {max_body_bytes} bytes")
    except ClientDisconnect as error:
        raise ClientLeft("the client closed the connection") from error
    return body


def _fields_of(body: bytearray) -> Mapping[str, object]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """Of gRPC every client sends its deadline; HTTP has no header for it."""
    value = headers.get(_TIMEOUT_HEADER)
    if value is None:
        return None
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < math.inf:
        raise InvalidRequest(
            f"the header {_TIMEOUT_HEADER} must be a number of seconds above 0, got {value!r}"
        )
    return timeout_s
