"""This module maps each path of the HTTP APIs to its endpoint; generations take the same path as
over gRPC."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.net.bytes_in_flight import BytesInFlight
from services.observe.prometheus import MetricsPage
from services.router.api_keys import ApiKeys
from services.router.dialects.choice_formats import AnswerFormat, ChatFormat, CompletionFormat
from services.router.dialects.dialect import MODEL, REQUEST_ID, Answer, Dialect, Envelope, Words
from services.router.dialects.messages_answer import MessageAnswer
from services.router.dialects.messages_call import read_messages_call
from services.router.dialects.openai_answer import OpenAiAnswer
from services.router.dialects.openai_call import OpenAiCall, read_chat_call, read_completion_call
from services.router.dialects.responses_answer import ResponseAnswer, ResponseStore
from services.router.dialects.responses_call import put_stored_items, read_responses_call
from services.router.dialects.sglang import GenerateAnswer, read_generate_call
from services.router.http.body_reader import BodyReader, CountedBodies
from services.router.http.endpoints import About, Metrics, ModelList, StoredResponses, Tokenizing, Watching
from services.router.http.generating import Generating
from services.router.http.middleware import (
    CHATS,
    COMPLETIONS,
    GENERATE,
    HEALTH,
    MESSAGES,
    RESPONSES,
    HttpDoor,
    OneLength,
    RequestIds,
    answer_error,
    answer_http_error,
    tenant_of,
)
from services.router.http.page import Page
from services.router.models import Models
from services.router.watch_cluster import Watch
from services.values.errors import IsthmusError

_STORED_RESPONSES = 10_000
_STORED_BYTES = 64 << 20


def http_app(
    models: Models,
    watch: Watch,
    *,
    page: Page | None = None,
    keys: ApiKeys | None = None,
    allowed_origins: Sequence[str] = (),
    leaves_images_out: bool = False,
    max_body_bytes: Callable[[], int] = lambda: 8 << 20,
    in_flight: BytesInFlight | None = None,
    clock: Callable[[], float] = time.time,
    count: Callable[[str], None] = lambda dialect: None,
    metrics: MetricsPage | None = None,
) -> ASGIApp:
    """Return the ASGI app. Web pages of `allowed_origins` may call it. `clock` returns seconds since the
    epoch, for the `created` fields; `count` is told each call's dialect."""
    store = ResponseStore(_STORED_RESPONSES, _STORED_BYTES)
    bodies = BodyReader(max_body_bytes, models.context_tokens, leaves_images_out=leaves_images_out)
    generating = (
        Route(path, Generating(dialect, models, bodies, clock, count).answer, methods=["POST"])
        for path, dialect in _dialects(store).items()
    )
    stored, tokens = StoredResponses(store), Tokenizing(models, bodies)
    model_list, about = ModelList(models, int(clock())), About(models)
    routes = [
        *generating,
        Route(f"{RESPONSES}/{{id}}", stored.look, methods=["GET"]),
        Route(f"{RESPONSES}/{{id}}", stored.delete, methods=["DELETE"]),
        Route(f"{MESSAGES}/count_tokens", tokens.count, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", model_list.all, methods=["GET"]),
        Route("/v1/models/{id:path}", model_list.one, methods=["GET"]),  # Some ids have slashes.
        Route(HEALTH, model_list.health, methods=["GET"]),
        Route("/v1/cluster/watch", Watching(watch).stream, methods=["GET"]),
        Route("/version", about.version, methods=["GET"]),
        Route("/model_info", about.model_info, methods=["GET"]),
        Route("/server_info", about.server_info, methods=["GET"]),
        Route("/flush_cache", about.flush_cache, methods=["GET", "POST"]),
        *(page.routes() if page is not None else ()),
        *([Route("/metrics", Metrics(metrics).show, methods=["GET"])] if metrics is not None else ()),
    ]
    handlers = {IsthmusError: answer_error, HTTPException: answer_http_error, Exception: answer_error}
    starlette = Starlette(routes=routes, exception_handlers=handlers)
    starlette.router.redirect_slashes = False  # Its URL's scheme may not be the proxy's.
    app: ASGIApp = starlette
    if in_flight is not None:
        app = CountedBodies(app, in_flight)
    # The rest is outside of Starlette, which answers bugs outside of its own middleware.
    if keys is not None:
        open_paths = frozenset({HEALTH}) | (page.paths if page is not None else frozenset())
        app = HttpDoor(app, keys, open_paths=open_paths)
    if allowed_origins:  # This is outside of HttpDoor: a browser's preflight request has no key.
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, MODEL, "Retry-After"),
        )
    inner = OneLength(_without_last_slash(app))
    return RequestIds(inner, models.is_running, partial(tenant_of, keys))


def _without_last_slash(app: ASGIApp) -> ASGIApp:
    """A client's base URL and path may both have a slash: the app sees /v1/models for /v1/models/."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "/")
        if path != "/" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await app(scope, receive, send)

    return served


def _dialects(store: ResponseStore) -> dict[str, Dialect[Any]]:
    def openai(
        make_format: Callable[[Words], AnswerFormat],
    ) -> Callable[[OpenAiCall, Envelope, Words], Answer]:
        return lambda call, envelope, words: OpenAiAnswer(call, envelope, make_format, words)

    return {
        CHATS: Dialect("chat", read_chat_call, openai(ChatFormat)),
        COMPLETIONS: Dialect("completions", read_completion_call, openai(CompletionFormat)),
        RESPONSES: Dialect(
            "responses",
            read_responses_call,
            lambda call, envelope, words: ResponseAnswer(call, envelope, store),
            lambda call: put_stored_items(call, partial(store.items, call.request.tenant)),
            lambda call: store.turns(call.request.tenant, call.previous_id),
        ),
        MESSAGES: Dialect(
            "messages", read_messages_call, lambda call, envelope, words: MessageAnswer(call, envelope)
        ),
        GENERATE: Dialect(
            "sglang", read_generate_call, lambda call, envelope, words: GenerateAnswer(call, words.token_text)
        ),
    }
