"""The Generation service: gRPC in front of the Generator."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc

from services.net import servers
from services.observe import traces
from services.router.cluster import Cluster, Explained, RankStatus
from services.router.placement.candidates import Candidate, DecodeCandidate
from services.router.placement.decision import Decision, Nowhere
from services.router.placement.price import Priced
from services.router.request.generation import Explanation, Generator
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest, IsthmusError
from services.values.rank import Role
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
    ) -> None:
        traceparent = traces.traceparent_in(context.invocation_metadata())
        timeout_s = servers.remaining_s(context)
        # A client may have stopped reading.
        async with asyncio.timeout(self.time_limit_s(timeout_s)):
            async with aclosing(self._generator.generate(request, timeout_s, traceparent)) as responses:
                async for response in responses:
                    await context.write(response)

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must be set")
        return generation_pb2.AbortResponse(found=self._generator.abort(request.request_id))

    async def Explain(
        self, request: generation_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ExplainResponse:
        return _explanation(await self._generator.explain(request.request))

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
        return generation_pb2.ListRanksResponse(
            ranks=map(_rank_status, self._cluster.status()),
            staleness_s=self._cluster.staleness_s,
            degraded=self._cluster.degraded or "",
        )

    # -- services.router.http.backend.GenerationBackend -------------------------------------------------

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None, traceparent: str
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        # OpenAI's answers have no place for the prompt's ids.
        return self._generator.generate(request, timeout_s, traceparent, tells_prompt=False)

    async def tokenize(self, request: generation_pb2.GenerateRequest) -> generation_pb2.TokenizeResponse:
        ids, context_tokens = await self._generator.tokenize(request)
        return generation_pb2.TokenizeResponse(token_ids=ids, max_context_tokens=context_tokens)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return await self._generator.detokenize(model, token_ids)

    def time_limit_s(self, timeout_s: float | None) -> float:
        return self._generator.time_limit_s(timeout_s)

    def rejected(self, error: IsthmusError) -> None:
        self._generator.rejected(error)

    def check_usable(self) -> None:
        self._cluster.check_usable()

    def is_running(self, request_id: str) -> bool:
        return self._generator.is_running(request_id)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._tokenizer.token_bytes(token_id)

    async def list_models(self) -> generation_pb2.ListModelsResponse:
        """With the ranks that are up; the context does not change while they come and go."""
        known = bool(self._cluster.ranks(Role.DECODE))
        model = generation_pb2.Model(
            id=self._model_name,
            max_context_tokens=self._cluster.max_context_tokens() if known else 0,
            prefill_ranks=self._num_up(Role.PREFILL),
            decode_ranks=self._num_up(Role.DECODE),
        )
        return generation_pb2.ListModelsResponse(models=[model])

    def _num_up(self, role: Role) -> int:
        return sum(map(self._cluster.is_up, self._cluster.ranks(role)))


def _explanation(told: Explanation) -> generation_pb2.ExplainResponse:
    explained = told.explained
    decision, pinned = explained.decision, None
    response = generation_pb2.ExplainResponse(
        prompt_tokens=told.prompt_tokens,
        reason=decision.reason,
        degraded=explained.degraded or "",
        carried_bytes=explained.carried_bytes,
        constraint=told.constraint,
        past_answers=told.past_answers,
    )
    chosen, ranked, unpriced = _parts(decision)
    for priced in ranked:
        candidate = _candidate(priced, priced is chosen, explained)
        response.candidates.append(candidate)
        pinned = candidate.decode if candidate.pinned else pinned
    for rank in unpriced:
        response.candidates.append(_unpriced(rank, explained))
        pinned = convert.rank_id_to_proto(rank.id) if rank.id.key == explained.pinned else pinned
    if pinned is not None:
        response.pinned.CopyFrom(pinned)
    return response


def _parts(
    decision: Decision | Nowhere,
) -> tuple[Priced | None, tuple[Priced, ...], tuple[Candidate, ...]]:
    """The choice, it and others that have a price, and those that have none."""
    if isinstance(decision, Nowhere):
        return None, (), decision.candidates
    return decision.chosen, decision.ranked, decision.excluded


def _candidate(priced: Priced, chosen: bool, explained: Explained) -> generation_pb2.Candidate:
    decode, prefill = priced.decode, priced.prefill
    return generation_pb2.Candidate(
        decode=convert.rank_id_to_proto(decode.id),
        prefill=None if prefill is None else convert.rank_id_to_proto(prefill.id),
        plan=convert.plan_to_proto(priced.plan),
        decode_hit_tokens=decode.hit_tokens,
        prefill_hit_tokens=0 if prefill is None else prefill.hit_tokens,
        decode_indexed_tokens=decode.matched_tokens,
        prefill_indexed_tokens=0 if prefill is None else prefill.matched_tokens,
        decode_context_tokens=_context_tokens(decode),
        prefill_context_tokens=0 if prefill is None else _context_tokens(prefill),
        decode_resume_tokens=decode.resume_tokens,
        decode_indexed_resume_tokens=decode.matched_resume_tokens,
        decode_tokens_per_step=decode.tokens_per_step,
        prefill_resume_tokens=None if prefill is None else prefill.resume_tokens,
        prefill_indexed_resume_tokens=None if prefill is None else prefill.matched_resume_tokens,
        terms=[generation_pb2.CostTerm(name=name, seconds=seconds) for name, seconds in priced.terms],
        total_s=priced.total_s,
        pinned=explained.pinned == decode.id.key,
        chosen=chosen,
    )


def _unpriced(rank: Candidate, explained: Explained) -> generation_pb2.Candidate:
    rank_id = convert.rank_id_to_proto(rank.id)
    if isinstance(rank, DecodeCandidate):
        return generation_pb2.Candidate(
            decode=rank_id,
            decode_hit_tokens=rank.hit_tokens,
            decode_indexed_tokens=rank.matched_tokens,
            decode_context_tokens=_context_tokens(rank),
            decode_resume_tokens=rank.resume_tokens,
            decode_indexed_resume_tokens=rank.matched_resume_tokens,
            decode_tokens_per_step=rank.tokens_per_step,
            pinned=explained.pinned == rank.id.key,
            excluded=rank.excluded,
        )
    return generation_pb2.Candidate(
        prefill=rank_id,
        prefill_hit_tokens=rank.hit_tokens,
        prefill_indexed_tokens=rank.matched_tokens,
        prefill_context_tokens=_context_tokens(rank),
        prefill_resume_tokens=rank.resume_tokens,
        prefill_indexed_resume_tokens=rank.matched_resume_tokens,
        excluded=rank.excluded,
    )


def _context_tokens(rank: Candidate) -> int:
    """0: it is bounded by nothing."""
    return int(rank.holds_tokens) if rank.holds_tokens < math.inf else 0


def _rank_status(status: RankStatus) -> generation_pb2.RankStatus:
    registration, progress = status.view.registration, status.progress
    return generation_pb2.RankStatus(
        rank=convert.rank_id_to_proto(registration.id),
        role=convert.role_to_proto(registration.role),
        state=status.view.condition,
        endpoint=registration.address.endpoint,
        model=registration.model,
        index_blocks=status.num_blocks,
        epoch=progress.epoch,
        next_sequence=progress.next_seq,
        record_age_s=progress.age_s,
        current=progress.current,
        trust=status.trust,
        load=convert.load_to_proto(status.now.load),
        pending_tokens=status.now.pending_tokens,
        prefill_tokens_per_s=status.now.tokens_per_s,
        excluded=status.excluded,
        unregistered_s=status.unregistered_s,
        staleness_s=status.staleness_s,
        resumable_blocks=status.num_resumable,
        resume_trust=None if status.num_resumable is None else status.resume_trust,
        pair_blocks=registration.has_pair_blocks,
    )
