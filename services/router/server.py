"""The Generation service: gRPC in front of the Generator."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc

from services import rpc, telemetry
from services.errors import InvalidRequest
from services.kv.types import Role
from services.router.cluster import Cluster, Placed
from services.router.generation import Generator
from services.router.placement import DecodeCandidate, Priced
from services.router.tokenizer import Tokenizer
from services.wire import convert
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Also the backend of the OpenAI front, so that both go one way."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, generator: Generator, cluster: Cluster) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._generator = generator
        self._cluster = cluster

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        traceparent = telemetry.traceparent_in(context.invocation_metadata())
        responses = self._generator.generate(request, rpc.remaining_s(context), traceparent)
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must be set")
        return generation_pb2.AbortResponse(found=self._generator.abort(request.request_id))

    async def Explain(
        self, request: generation_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ExplainResponse:
        prompt_tokens, placed = await self._generator.explain(request.request)
        return _explanation(prompt_tokens, placed)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        return await self.list_models()

    # -- services.router.openai.GenerationBackend -------------------------------------------------

    def generate(
        self, request: generation_pb2.GenerateRequest, traceparent: str
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        return self._generator.generate(request, traceparent=traceparent)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    async def list_models(self) -> generation_pb2.ListModelsResponse:
        decodes = self._cluster.ranks(Role.DECODE)
        contexts = [view.registration.max_context_tokens for view in decodes]
        model = generation_pb2.Model(
            id=self._model_name,
            max_context_tokens=max(contexts, default=0),
            prefill_ranks=len(self._cluster.ranks(Role.PREFILL)),
            decode_ranks=len(decodes),
        )
        return generation_pb2.ListModelsResponse(models=[model])


def _explanation(prompt_tokens: int, placed: Placed) -> generation_pb2.ExplainResponse:
    decision = placed.decision
    response = generation_pb2.ExplainResponse(
        prompt_tokens=prompt_tokens, reason=decision.reason, degraded=placed.degraded or ""
    )
    for priced in decision.ranked:
        response.candidates.append(_candidate(priced, priced is decision.chosen, placed))
    for excluded in decision.excluded:
        candidate = response.candidates.add(excluded=excluded.excluded)
        side = candidate.decode if isinstance(excluded, DecodeCandidate) else candidate.prefill
        side.CopyFrom(convert.rank_id_to_proto(excluded.id))
    return response


def _candidate(priced: Priced, chosen: bool, placed: Placed) -> generation_pb2.Candidate:
    prefill = priced.prefill
    return generation_pb2.Candidate(
        decode=convert.rank_id_to_proto(priced.decode.id),
        prefill=None if prefill is None else convert.rank_id_to_proto(prefill.id),
        plan=convert.plan_to_proto(priced.plan),
        decode_hit_tokens=priced.decode.hit_tokens,
        prefill_hit_tokens=0 if prefill is None else prefill.hit_tokens,
        terms=[generation_pb2.CostTerm(name=name, seconds=seconds) for name, seconds in priced.terms],
        total_s=priced.total_s,
        pinned=placed.pinned == priced.decode.id.key,
        chosen=chosen,
    )
