"""This is the gRPC front end: the Generation service in front of the Generators of the models."""

import asyncio
from contextlib import aclosing

import grpc

from services.net import servers
from services.observe import traces
from services.router import callers
from services.router.cluster_messages import all_candidates
from services.router.dialects.dialect import MODEL
from services.router.models import Models
from services.router.observed_load import ObservedLoad
from services.router.request.generation import Explanation
from services.router.request.progress import held_tokens
from services.router.tenants import Tenants
from services.router.watch_cluster import Watch
from services.values.errors import Forbidden, InvalidRequest, NotFound
from services.wire.generation_messages import PackedIds, ReadRequest, read_request
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
GENERATE = f"/{SERVICE_NAME}/Generate"
_PROMPT_TOKEN_IDS = generation_pb2.GenerateResponse.PROMPT_TOKEN_IDS_FIELD_NUMBER
_UNREAD_S = 60.0  # A response may wait this long for its reader.


def generate_handler(service: "GenerationService") -> grpc.RpcMethodHandler:
    return grpc.unary_stream_rpc_method_handler(service.Generate, request_deserializer=read_request)


def add_to_server(service: "GenerationService", server: grpc.aio.Server) -> None:
    """Add the service as the generated function does, but with `generate_handler`."""
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    server.add_registered_method_handlers(SERVICE_NAME, {"Generate": generate_handler(service)})


class GenerationService(generation_pb2_grpc.GenerationServicer):
    def __init__(
        self,
        models: Models,
        watch: Watch,
        tenants: Tenants | None = None,
        load: ObservedLoad | None = None,
    ) -> None:
        self._models = models
        self._watch = watch
        self._tenants = tenants
        self._load = load

    async def Generate(self, read: ReadRequest, context: grpc.aio.ServicerContext) -> None:
        """Write responses that are already serialized (`add_to_server`)."""
        traceparent = traces.traceparent_in(context.invocation_metadata())
        timeout_s = servers.remaining_s(context)
        try:
            request = callers.own(read.request)
        except Forbidden as error:
            self._models.rejected(error)
            raise
        is_alias = self._models.is_alias(request.model)
        model = self._models.take(request)
        if is_alias:
            await context.send_initial_metadata(((MODEL, request.model),))
        prompts: list[PackedIds] = []
        generated = model.generator.generate(
            request, timeout_s, traceparent, ids=read.ids, report_prompt=prompts.append
        )
        # A client may have stopped reading.
        async with asyncio.timeout(model.generator.time_limit_s(timeout_s)):
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
        found = self._models.abort(request.request_id, tenant)
        return generation_pb2.AbortResponse(found=found)

    async def Explain(
        self, request: generation_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ExplainResponse:
        asked = callers.own(request.request)
        return _explanation(await self._models.take(asked).generator.explain(asked))

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        asked = callers.own(request.request)
        return await self._models.take(asked).generator.tokenize(asked)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        named = callers.own(GenerateRequest(model=request.model, tenant=request.tenant))
        generator = self._models.take(named).generator
        text = await generator.detokenize(named.model, request.token_ids, named.tenant)
        return generation_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        return self._models.list_models()

    async def ListRanks(
        self, request: generation_pb2.ListRanksRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListRanksResponse:
        return self._models.list_ranks()

    async def ListTenants(
        self, request: generation_pb2.ListTenantsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListTenantsResponse:
        caller = callers.current()
        if caller.tenant is None and not caller.is_operator:
            raise Forbidden("usage is a tenant's own: this API key is neither a tenant's nor an operator's")
        if self._tenants is None:
            raise NotFound("this router has no file of tenants (--tenants)")
        own = None if caller.is_operator else caller.tenant
        return self._tenants.usage(held_tokens(self._models.running), own)

    async def ListLoad(
        self, request: generation_pb2.ListLoadRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListLoadResponse:
        if not callers.current().is_operator:
            raise Forbidden("the load is of all tenants: this API key is not an operator's")
        if self._load is None:
            raise NotFound("this router remembers no requests (--plan-window-s=0)")
        return await self._load.list_load(request)

    async def WatchCluster(
        self, request: generation_pb2.WatchClusterRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with aclosing(self._watch.follow(request)) as responses:
            async for response in responses:
                # A client that stopped reading must not keep others from watching.
                async with asyncio.timeout(_UNREAD_S):
                    await context.write(response)


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
