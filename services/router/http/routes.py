"""The HTTP APIs over the same generation as the gRPC one: which path is whose."""

import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from services.router.dialects.call import REQUEST_ID
from services.router.dialects.openai.answer import OpenAiDialect
from services.router.dialects.openai.chat_call import read_chat_call
from services.router.dialects.openai.chat_format import ChatFormat
from services.router.dialects.openai.completion_call import read_completion_call
from services.router.dialects.openai.completion_format import CompletionFormat
from services.router.dialects.sampling_defaults import OPENAI, SamplingDefaults
from services.router.http.backend import GenerationBackend
from services.router.http.body import BodyReader
from services.router.http.error_answer import CHATS_PATH, answer_error, answer_http_error
from services.router.http.framing import OneLength
from services.router.http.generating import Generating
from services.router.http.key_door import HttpDoor
from services.router.http.models import Models
from services.router.http.request_id import RequestIds
from services.router.keys.api_keys import ApiKeys
from services.values.errors import IsthmusError

_HEALTH_PATH = "/health"


def http_app(
    generation: GenerationBackend,
    *,
    defaults: SamplingDefaults = OPENAI,
    keys: ApiKeys | None = None,
    allowed_origins: Sequence[str] = (),
    max_body_bytes: int = 8 << 20,
    clock: Callable[[], float] = time.time,
    count: Callable[[str], None] = lambda dialect: None,
) -> ASGIApp:
    """The ASGI app; without `keys` it serves anybody.

    `clock` gives seconds since the epoch, for the `created` fields. `count` is told each call's dialect.
    """
    words = generation.token_text, generation.token_bytes
    dialects = {
        CHATS_PATH: OpenAiDialect("chat", read_chat_call, ChatFormat, defaults, *words),
        "/v1/completions": OpenAiDialect(
            "completions", read_completion_call, CompletionFormat, defaults, *words
        ),
    }
    bodies = BodyReader(max_body_bytes)
    models = Models(generation, int(clock()))
    routes = [
        Route("/v1/models", models.all, methods=["GET"]),
        Route("/v1/models/{id:path}", models.one, methods=["GET"]),  # some have slashes
        *(
            Route(path, Generating(dialect, generation, bodies, clock, count).answer, methods=["POST"])
            for path, dialect in dialects.items()
        ),
        Route(_HEALTH_PATH, models.health, methods=["GET"]),
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
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "Retry-After"),
        )
    return RequestIds(OneLength(app), generation.is_running)
