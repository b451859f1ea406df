"""These endpoints serve models, tokens, stored responses, the server's own description, metrics, and the
watch of the cluster."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from google.protobuf import json_format
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.observe import build_info
from services.observe.prometheus import MetricsPage
from services.router import callers
from services.router.dialects import messages_answer as anthropic
from services.router.dialects.dialect import TENANT, Event, Json
from services.router.dialects.http_errors import error_object
from services.router.dialects.json_body import Body, InvalidParameter
from services.router.dialects.messages_call import read_count_request
from services.router.dialects.openai_call import read_chat_call, read_completion_call
from services.router.dialects.responses_answer import ResponseStore
from services.router.http.body_reader import BodyReader
from services.router.http.event_stream import EventStream, sse
from services.router.models import Models
from services.router.watch_cluster import Watch, WatchPace
from services.values.errors import Forbidden, InvalidRequest, NotFound
from services.wire.isthmus.v1.generation_pb2 import (
    GenerateRequest,
    Model,
    WatchClusterRequest,
    WatchClusterResponse,
)


class ModelList:
    def __init__(self, models: Models, created: int) -> None:
        self._models = models
        self._created = created

    async def health(self, request: Request) -> Response:
        """Return 200 where a request would be accepted, even if it had to wait; else 503 with the reason."""
        self._models.check_usable()
        return JSONResponse({"status": "ok"})

    async def all(self, request: Request) -> Response:
        models = await self._listed(request)
        if anthropic.sent_by_client(request.headers):
            return JSONResponse(anthropic.models_json(models))
        return JSONResponse({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        name = request.path_params["id"]
        if not name:
            return await self.all(request)
        for model in await self._listed(request):
            if model["id"] == name:
                return JSONResponse(model)
        raise NotFound(f"model {name!r} is not served here")

    async def _listed(self, request: Request) -> list[Json]:
        models = self._models.list_models().models
        if anthropic.sent_by_client(request.headers):
            return [anthropic.model_json(model.id, self._created) for model in models]
        return [self._model(model) for model in models]

    def _model(self, model: Model) -> Json:
        return {
            "id": model.id,
            "object": "model",
            "created": self._created,
            "owned_by": "isthmus",
            "max_model_len": model.max_context_tokens,
            **({"parent": model.base} if model.base else {}),
        }


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    request: GenerateRequest
    wants_texts: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str
    token_ids: list[int]
    tenant: str


def read_tokenize_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> TokenizeCall:
    body, read = Body(fields), read_completion_call
    if body.get("messages") is not None:
        read = read_chat_call
    call = read(fields, headers)
    if call.more:
        raise body.wrong("prompt", "must be one prompt; send a request for each of several")
    return TokenizeCall(call.request, body.flag("return_token_strs"))


def read_detokenize_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> DetokenizeCall:
    body = Body(fields)
    if body.get("tokens") is None:
        raise body.wrong("tokens", "must be set")
    return DetokenizeCall(body.text("model"), body.integers("tokens"), headers.get(TENANT, ""))


class Tokenizing:
    def __init__(self, models: Models, bodies: BodyReader) -> None:
        self._models = models
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        call = await self._bodies.read(request, read_tokenize_call)
        asked = callers.own(call.request)
        generator = self._models.take(asked).generator
        tokenized = await generator.tokenize(asked)
        ids = list(tokenized.token_ids)
        answer = {"count": len(ids), "max_model_len": tokenized.max_context_tokens, "tokens": ids}
        if call.wants_texts:
            answer["token_strs"] = list(map(generator.token_text, ids))
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        call = await self._bodies.read(request, read_detokenize_call)
        named = callers.own(GenerateRequest(model=call.model, tenant=call.tenant))
        generator = self._models.take(named).generator
        text = await generator.detokenize(named.model, call.token_ids, named.tenant)
        # vLLM uses the first name, and SGLang the second.
        return JSONResponse({"prompt": text, "text": text})

    async def count(self, request: Request) -> Response:
        counted = callers.own(await self._bodies.read(request, read_count_request))
        tokenized = await self._models.take(counted).generator.tokenize(counted)
        return JSONResponse({"input_tokens": len(tokenized.token_ids)})


class StoredResponses:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def look(self, request: Request) -> Response:
        stored = self._store.get(*_tenant_and_id(request))
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        tenant, response_id = _tenant_and_id(request)
        self._store.delete(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _tenant_and_id(request: Request) -> tuple[str, str]:
    return callers.current().tenant_of(request.headers.get(TENANT, "")), request.path_params["id"]


_NO_FLUSH = (
    "this router empties no cache: ranks serve other routers, too. Give each run a cache_salt of its own, or "
    "start the cluster again"
)


class About:
    """These endpoints describe the server, in the formats that clients of vLLM and SGLang expect.

    They describe --model. Only an operator sees its directory, and everybody where no keys are required;
    others see its name.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._version = build_info.versions()["version"]

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def model_info(self, request: Request) -> Response:
        path = self._shown_path()
        return JSONResponse({"model_path": path, "tokenizer_path": path, "is_generation": True})

    async def server_info(self, request: Request) -> Response:
        """Return no settings or states, as SGLang would: `isthmus status` and the metrics have ours."""
        names = {"served_model_name": self._models.default.name, "model_path": self._shown_path()}
        return JSONResponse({"version": self._version, **names, "internal_states": []})

    def _shown_path(self) -> str:
        model = self._models.default
        return model.path if callers.current().is_operator else model.name

    async def flush_cache(self, request: Request) -> Response:
        return JSONResponse(error_object(_NO_FLUSH, 501, None, 501), status_code=501)


class Metrics:
    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    async def show(self, request: Request) -> Response:
        """Refuse a tenant's key that is not an operator's, as the metrics cover all tenants' requests."""
        caller = callers.current()
        if caller.tenant is not None and not caller.is_operator:
            raise Forbidden("metrics are of all tenants: this API key is one tenant's")
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(self._page.rendered, accept)
        return Response(body, headers={"content-type": content_type})


_MEDIA_TYPE = "text/event-stream"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Watching:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pace = WatchPace()  # This is shared by all streams.

    async def stream(self, request: Request) -> Response:
        requested = read_watch(request.query_params, request.headers)
        try:
            responses = self._watch.follow(requested)
        except InvalidRequest as error:
            if not error.field:
                raise
            raise InvalidParameter(error.field, error.problem) from error
        if request.method == "HEAD":
            return Response(media_type=_MEDIA_TYPE)
        return EventStream(_events(responses, self._pace))


def read_watch(query: Mapping[str, str], headers: Mapping[str, str]) -> WatchClusterRequest:
    watch = WatchClusterRequest(tenant=headers.get(TENANT, ""))
    for name, value in query.items():
        if name not in _READERS:
            raise InvalidParameter(name, f"is not known here; {', '.join(_READERS)} are")
        setattr(watch, name, _READERS[name](name, value))
    named = headers.get(TENANT, "")
    if named and watch.tenant != named:
        raise InvalidParameter("tenant", f"differs from the header {TENANT}; leave one of them out")
    return watch


def _read_seconds(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidParameter(name, f"must be a number of seconds, got {value!r}") from None


def _read_boolean(name: str, value: str) -> bool:
    if value not in _BOOLEANS:
        raise InvalidParameter(name, f"must be one of {', '.join(_BOOLEANS)}, got {value!r}")
    return _BOOLEANS[value]


_READERS: Mapping[str, Callable[[str, str], object]] = {
    "interval_s": _read_seconds,
    "tenant": lambda name, value: value,
    "all_tenants": _read_boolean,
    "no_candidates": _read_boolean,
}


async def _events(
    responses: AsyncGenerator[WatchClusterResponse, None], pace: WatchPace
) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        async for response in responses:
            while (left_s := pace.left_s) > 0:
                await asyncio.sleep(left_s)
            with pace.turn():
                event = _event(response)
            yield event


def _event(response: WatchClusterResponse) -> bytes:
    return sse(Event(json_format.MessageToDict(response, preserving_proto_field_name=True)))
