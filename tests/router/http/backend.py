"""A backend of the OpenAI-compatible API that plays a script, and calls to the API over it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from services.router.dialects.sampling import OPENAI, SamplingDefaults
from services.router.http.routes import http_app
from services.router.models import Models
from services.router.served_model import Model as Served
from services.values import errors
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import RankId, TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import (
    Finish,
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    Model,
    Placement,
    StageTimes,
    TokenizeResponse,
    Usage,
    WatchClusterRequest,
    WatchClusterResponse,
)

DEADLINE_S = 10.0
HI = [{"role": "user", "content": "Hi"}]


class FakeBackend:
    """Plays a script: responses are yielded, errors raised, "wait" waits for ever.

    It holds on to what it plays, so that only closing closes it, never the garbage collector.
    """

    def __init__(
        self, *script: GenerateResponse | Exception | str, models: Sequence[str] = ("tiny",)
    ) -> None:
        self.script = script or (response("Hello", [72]), response(" you", [73]), finished("!", [33]))
        self.model_ids, self.unusable = models, ""
        self.unread_s = 3600.0  # after which a stream is closed
        self.context: int | None = None
        self.running: set[tuple[str, str]] = set()  # requests that came over gRPC
        self.requests: list[GenerateRequest] = []
        self.timeouts_s: list[float | None] = []
        self.traceparents: list[str] = []
        self.rejections: list[str] = []
        self.most_together = 1_000
        self.watches: list[WatchClusterRequest] = []
        self.watch_script: list[WatchClusterResponse | Exception | str] = []
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()

    def generate(
        self,
        request: GenerateRequest,
        timeout_s: float | None,
        traceparent: str,
        *,
        report_prompt: Any = None,
    ) -> AsyncGenerator[GenerateResponse, None]:
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        self.traceparents.append(traceparent)
        self.playing = self.play(self.script)
        return self.playing

    def context_tokens(self) -> int | None:
        return self.context

    def follow(self, request: WatchClusterRequest) -> AsyncGenerator[WatchClusterResponse, None]:
        self.watches.append(request)
        self.playing = self.play(self.watch_script)
        return self.playing

    async def play(self, script: Sequence[Any]) -> AsyncGenerator[Any, None]:
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, str):
                    self.waiting.set()
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.closed.set()

    def time_limit_s(self, timeout_s: float | None) -> float:
        return self.unread_s if timeout_s is None else timeout_s

    def check_together(self, tenant: str, requests: int) -> None:
        if requests > self.most_together:
            raise errors.InvalidRequest("prompt", f"has {requests} prompts")

    def rejected(self, error: errors.IsthmusError) -> None:
        self.rejections.append(type(error).__name__)

    async def tokenize(self, request: GenerateRequest) -> TokenizeResponse:
        self.requests.append(request)
        return TokenizeResponse(token_ids=[72, 73, 33], max_context_tokens=512)

    async def detokenize(self, model: str, token_ids: Sequence[int], tenant: str) -> str:
        return "".join(map(self.token_text, token_ids))

    def list_models(self) -> ListModelsResponse:
        models = [Model(id=name, max_context_tokens=512, decode_ranks=1) for name in self.model_ids]
        return ListModelsResponse(models=models)

    def check_usable(self, model: str = "") -> None:
        if self.unusable:
            raise errors.Unavailable(self.unusable)

    def is_running(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self.running

    def token_text(self, token_id: int) -> str:
        return "\ufffd" if token_id > 127 else chr(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None


def response(text: str, ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = ()) -> GenerateResponse:
    return GenerateResponse(request_id="r1", text=text, token_ids=ids, logprobs=logprobs)


def finished(
    text: str = "", ids: Sequence[int] = (), reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_STOP
) -> GenerateResponse:
    finish = Finish(
        reason=reason,
        matched_stop="END",
        usage=Usage(
            prompt_tokens=10,
            completion_tokens=3,
            reused_tokens=4,
            computed_tokens=6,
            decode_prefix_len=8,
            delta_tokens=2,
            kv_bytes_moved=2048,
            kv_bytes_saved=2**33,
            carried_bytes={"recurrent": 1024},
        ),
        placement=Placement(
            decode=RankId(worker="d0", rank=1),
            prefill=RankId(worker="p0", rank=0),
            plan=common_pb2.PLAN_REMOTE,
            reason="cheapest",
        ),
        stages=StageTimes(route_s=0.25),
    )
    return GenerateResponse(request_id="r1", text=text, token_ids=ids, finish=finish)


def logprobs_of(token_id: int, *others: int) -> TokenLogprobs:
    top = [TokenLogprob(token_id=other, logprob=-0.5) for other in others]
    return TokenLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.25), top=top)


def models_of(
    backend: Any, defaults: SamplingDefaults = OPENAI, path: str = "", cluster: Any = None
) -> Models:
    """The backend is the only model."""
    models = Models()
    models.open(Served("tiny", backend, cluster, defaults, path, CollectorRegistry()))
    return models


def app_of(backend: FakeBackend, watch: Any = None, **options: Any) -> ASGIApp:
    return http_app(models_of(backend), watch or backend, **options)


def client(
    backend: FakeBackend,
    watch: Any = None,
    defaults: SamplingDefaults = OPENAI,
    model_path: str = "",
    models: Models | None = None,
    **options: Any,
) -> httpx.AsyncClient:
    models = models or models_of(backend, defaults, model_path)
    app = http_app(models, watch or backend, clock=lambda: 1234.5, **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


async def post(backend: FakeBackend, path: str, body: Any, **options: Any) -> httpx.Response:
    async with client(backend) as http:
        return await http.post(path, json=body, **options)


async def chat(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/v1/chat/completions", {"model": "tiny", "messages": HI, **body})


async def complete(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/v1/completions", {"model": "tiny", "prompt": "Hi", **body})


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
