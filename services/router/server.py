"""The Generation service: gRPC in front of the Generator."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import grpc

from services.net import servers
from services.observe import traces
from services.router.cluster import Cluster
from services.router.dialects.sampling_defaults import OPENAI, SamplingDefaults, fill_in
from services.router.keys import callers
from services.router.keys.refusals import WRONG_KEY
from services.router.request.generation import Explanation, Generator
from services.router.shown.candidates import all_candidates
from services.router.shown.ranks import ranks_of
from services.router.text.tokenizer import Tokenizer
from services.router.watch.asked import read_asked
from services.router.watch.watch import Watch
from services.values.errors import Forbidden, InvalidRequest, IsthmusError, Unauthenticated
from services.values.rank import Role
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc
from services.wire.packed_ids import PackedIds
from services.wire.read_request import ReadRequest, read_request

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
GENERATE = f"/{SERVICE_NAME}/Generate"
_PROMPT_TOKEN_IDS = generation_pb2.GenerateResponse.PROMPT_TOKEN_IDS_FIELD_NUMBER
_UNREAD_S = 60.0  # that a response may wait for its reader


def generate_handler(service: "GenerationService") -> grpc.RpcMethodHandler:
    """How Generate's messages are read and written."""
    return grpc.unary_stream_rpc_method_handler(service.Generate, request_deserializer=read_request)


def add_to_server(service: "GenerationService", server: grpc.aio.Server) -> None:
    """As the generated function does, but for `generate_handler`."""
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    server.add_registered_method_handlers(SERVICE_NAME, {"Generate": generate_handler(service)})


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Also the backend of the OpenAI front, so that both go one way."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        generator: Generator,
        cluster: Cluster,
        watch: Watch,
        defaults: SamplingDefaults = OPENAI,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._generator = generator
        self._cluster = cluster
        self._watch = watch
        self._defaults = defaults

    async def Generate(self, read: ReadRequest, context: grpc.aio.ServicerContext) -> None:
        """Writes serialized responses (`add_to_server`)."""
        traceparent = traces.traceparent_in(context.invocation_metadata())
        timeout_s = servers.remaining_s(context)
        try:
            request = _callers_own(read.request)
        except Forbidden as error:
            self._generator.rejected(error)
            raise
        fill_in(request.sampling, self._defaults)
        prompts: list[PackedIds] = []
        generated = self._generator.generate(
            request, timeout_s, traceparent, ids=read.ids, tell_prompt=prompts.append
        )
        # A client may have stopped reading.
        async with asyncio.timeout(self.time_limit_s(timeout_s)):
            async with aclosing(generated) as responses:
                async for response in responses:
                    prompt = prompts.pop().field(_PROMPT_TOKEN_IDS) if prompts else b""
                    await context.write(response.SerializeToString() + prompt)

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must be set")
        caller = callers.current()
        tenant = caller.tenant_of(request.tenant) if request.tenant else caller.tenant
        found = self._generator.abort(request.request_id, tenant)
        return generation_pb2.AbortResponse(found=found)

    async def Explain(
        self, request: generation_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ExplainResponse:
        return _explanation(await self._generator.explain(_callers_own(request.request)))

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        return await self.tokenize(request.request)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        text = await self.detokenize(request.model, request.token_ids)
        return generation_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        return await self.list_models()

    async def ListRanks(
        self, request: generation_pb2.ListRanksRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListRanksResponse:
        return ranks_of(self._cluster)

    async def WatchCluster(
        self, request: generation_pb2.WatchClusterRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with aclosing(self.watch(request)) as responses:
            async for response in responses:
                # Who has stopped reading must not keep another from watching.
                async with asyncio.timeout(_UNREAD_S):
                    await context.write(response)

    # -- services.router.http.backend.GenerationBackend -------------------------------------------------

    def generate(
        self,
        request: generation_pb2.GenerateRequest,
        timeout_s: float | None,
        traceparent: str,
        *,
        tells_prompt: bool,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        own = _callers_own(request)
        generate = partial(self._generator.generate, own, timeout_s, traceparent)
        scores = own.sampling.HasField("prompt_logprobs")  # which name no ids
        return _with_prompt(generate) if tells_prompt or scores else generate()

    async def tokenize(self, request: generation_pb2.GenerateRequest) -> generation_pb2.TokenizeResponse:
        ids, context_tokens = await self._generator.tokenize(_callers_own(request))
        return generation_pb2.TokenizeResponse(token_ids=ids, max_context_tokens=context_tokens)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return await self._generator.detokenize(model, token_ids)

    def time_limit_s(self, timeout_s: float | None) -> float:
        return self._generator.time_limit_s(timeout_s)

    def rejected(self, error: IsthmusError) -> None:
        self._generator.rejected(error)

    def check_usable(self) -> None:
        self._cluster.check_usable()

    def context_tokens(self) -> int | None:
        return self._cluster.max_context_tokens() if self._cluster.ranks(Role.DECODE) else None

    def is_running(self, tenant: str, request_id: str) -> bool:
        return self._generator.is_running(tenant, request_id)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._tokenizer.token_bytes(token_id)

    def watch(
        self, request: generation_pb2.WatchClusterRequest
    ) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
        responses = self._watch.responses(read_asked(request, callers.current()))
        return _while_good(callers.still_good(), responses)

    async def list_models(self) -> generation_pb2.ListModelsResponse:
        """With the ranks that are up; the context does not change while they come and go."""
        model = generation_pb2.Model(
            id=self._model_name,
            max_context_tokens=self.context_tokens() or 0,
            prefill_ranks=self._num_up(Role.PREFILL),
            decode_ranks=self._num_up(Role.DECODE),
        )
        return generation_pb2.ListModelsResponse(models=[model])

    def _num_up(self, role: Role) -> int:
        return sum(map(self._cluster.is_up, self._cluster.ranks(role)))


async def _with_prompt(
    generate: Callable[..., AsyncGenerator[generation_pb2.GenerateResponse, None]],
) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """The first response has its ids. `generate` is Generator's."""
    prompts: list[PackedIds] = []
    async with aclosing(generate(tell_prompt=prompts.append)) as responses:
        async for response in responses:
            if prompts:
                response.MergeFromString(prompts.pop().field(_PROMPT_TOKEN_IDS))
            yield response


async def _while_good(
    is_good: Callable[[], bool], responses: AsyncGenerator[generation_pb2.WatchClusterResponse, None]
) -> AsyncGenerator[generation_pb2.WatchClusterResponse, None]:
    """Ends as where the router stops: who connects again is told why. Closes `responses`.

    Raises Unauthenticated before the first of them.
    """
    has_begun = False
    async with aclosing(responses):
        async for response in responses:
            if not is_good():
                if has_begun:
                    return
                raise Unauthenticated(WRONG_KEY)
            has_begun = True
            yield response


def _callers_own(request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
    """With the tenant of the key that was shown, if it has one. Raises Forbidden where it names another."""
    request.tenant = callers.current().tenant_of(request.tenant)
    return request


def _explanation(told: Explanation) -> generation_pb2.ExplainResponse:
    explained = told.explained
    candidates = all_candidates(explained.decision, explained.pinned)
    return generation_pb2.ExplainResponse(
        prompt_tokens=told.prompt_tokens,
        candidates=candidates,
        reason=explained.decision.reason,
        degraded=explained.degraded or "",
        pinned=next((candidate.decode for candidate in candidates if candidate.pinned), None),
        carried_bytes=explained.carried_bytes,
        constraint=told.constraint,
        past_answers=told.past_answers,
    )
