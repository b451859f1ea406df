"""The OpenAI-compatible HTTP API over the same generation as the gRPC one.

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
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.keys.api_keys import ApiKeys
from services.router.openai.answer import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Json,
    Piece,
    TokenBytes,
    TokenText,
    finish_reason,
    isthmus_json,
    usage_json,
)
from services.router.openai.errors import (
    CHATS_PATH,
    BodyTooLong,
    answer_error,
    answer_http_error,
    error_json,
)
from services.router.openai.framing import OneLength
from services.router.openai.key_door import HttpDoor
from services.router.openai.request import GenerationCall, read_chat_call, read_completion_call
from services.router.openai.request_id import REQUEST_ID, RequestIds
from services.router.openai.sampling_defaults import OPENAI, SamplingDefaults
from services.values.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    NotFound,
    ProtocolError,
)
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse, ListModelsResponse

_T = TypeVar("_T")
_ReadCall = Callable[[Mapping[str, object], Mapping[str, str], SamplingDefaults], GenerationCall]

# Next line, line separator, paragraph separator: JSON leaves them as they are, and a client that splits a
# stream as Python's splitlines does (httpx) would cut an event there.
_LINE_SEPARATORS = "\x85\u2028\u2029"

_HEALTH_PATH = "/health"
_TIMEOUT_HEADER = "x-isthmus-timeout-s"
_LONG_BODY = 64 << 10  # bytes; reading a longer one would be felt by every stream on the loop


class GenerationBackend(Protocol):
    """What this API needs of the router; the gRPC API serves the same."""

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


def openai_app(
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
    api = _OpenAiApi(generation, defaults, max_body_bytes, clock)
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


class _OpenAiApi:
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
        answer = _HttpAnswer(
            call,
            answer_format(self._generation.token_text, self._generation.token_bytes),
            model=call.request.model or await self._only_model(),
            created=int(self._clock()),
        )
        responses = self._generation.generate(call.request, timeout_s, call.traceparent)
        if call.stream:
            return _EventStream(answer.events(responses), self._generation.time_limit_s(timeout_s))
        return JSONResponse(await _until_disconnect(request.receive, answer.whole(responses)))

    async def _read(self, request: Request, read_call: _ReadCall) -> GenerationCall:
        body = await _read_body(request, self._max_body_bytes)

        def read() -> GenerationCall:
            return read_call(_fields_of(body), request.headers, self._defaults)

        return read() if len(body) < _LONG_BODY else await asyncio.to_thread(read)

    async def _only_model(self) -> str:
        models = (await self._generation.list_models()).models
        return models[0].id if models else ""


class _HttpAnswer:
    """One answer in the making."""

    def __init__(self, call: GenerationCall, answer_format: AnswerFormat, model: str, created: int) -> None:
        self._call = call
        self._format = answer_format
        self._model = model
        self._created = created

    async def whole(self, responses: AsyncGenerator[GenerateResponse, None]) -> Json:
        """Closes `responses`."""
        joined = GenerateResponse()
        texts = []
        async with aclosing(responses):
            async for response in responses:
                texts.append(response.text)
                joined.MergeFrom(response)  # the lists grow; text and finish are replaced
        _check_finished(joined)
        joined.text = "".join(texts)
        return {
            **self._envelope(self._format.object_name, joined, [self._format.whole(self._piece(joined))]),
            "usage": usage_json(joined.finish.usage),
            "isthmus": isthmus_json(joined.finish),
        }

    async def events(self, responses: AsyncGenerator[GenerateResponse, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error before the first of them is raised. Closes `responses`."""
        started = False
        response = GenerateResponse()
        try:
            async with aclosing(responses):
                async for response in responses:
                    for chunk in self._chunks(response, is_first=not started):
                        started = True
                        yield _event(chunk)
            _check_finished(response)
        except Exception as error:
            if not started:
                raise
            yield _event(error_json(error))
            if not isinstance(error, IsthmusError):
                raise
        else:
            yield b"data: [DONE]\n\n"

    def _chunks(self, response: GenerateResponse, is_first: bool) -> list[Json]:
        piece = self._piece(response)
        choices = [self._format.opening()] if is_first else []
        if piece.text or piece.logprobs or piece.token_ids or piece.finish_reason:
            choices.append(self._format.delta(piece))
        chunks = [self._chunk(response, [choice]) for choice in choices if choice is not None]
        if response.HasField("finish"):
            chunks[-1]["isthmus"] = isthmus_json(response.finish)
            if self._call.include_usage:
                chunks.append({**self._chunk(response, []), "usage": usage_json(response.finish.usage)})
        return chunks

    def _chunk(self, response: GenerateResponse, choices: list[Json]) -> Json:
        chunk = self._envelope(self._format.chunk_object_name, response, choices)
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _envelope(self, object_name: str, response: GenerateResponse, choices: list[Json]) -> Json:
        return {
            "id": self._format.id_prefix + response.request_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _piece(self, response: GenerateResponse) -> Piece:
        return Piece(
            response.text,
            token_ids=response.token_ids if self._call.return_token_ids else None,
            logprobs=response.logprobs if self._call.wants_logprobs else None,
            finish_reason=finish_reason(response.finish) if response.HasField("finish") else None,
        )


class _EventStream(Response):
    """Sends server-sent events as they come, until the client leaves or the time is over: it may have stopped
    reading. Closes `events`."""

    def __init__(self, events: AsyncGenerator[bytes, None], time_limit_s: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._time_limit_s = time_limit_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._time_limit_s):
                await _until_disconnect(receive, self._send_events(send))
        except _ClientLeft:
            return  # nobody to answer, and a stream that has begun cannot change its status
        except TimeoutError:
            if not self._started:
                raise DeadlineExceeded("the deadline has passed") from None

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            event = await anext(events)  # what it raises can still have a status of its own
            self._started = True
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": event, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _ClientLeft(Aborted):
    """Nobody is there to be answered."""


def _check_finished(last: GenerateResponse) -> None:
    if not last.HasField("finish"):
        raise ProtocolError("the generation ended without a finish")


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; when the client leaves first, `work` is cancelled and has ended.

    Raises:
        _ClientLeft: nothing can be sent any more.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _ClientLeft("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, max_body_bytes: int) -> bytearray:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_body_bytes:
                raise BodyTooLong(f"the body must be at most {max_body_bytes} bytes")
    except ClientDisconnect as error:
        raise _ClientLeft("the client closed the connection") from error
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


def _event(value: Json) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for separator in _LINE_SEPARATORS:
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return b"data: " + text.encode() + b"\n\n"
