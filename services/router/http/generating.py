"""Every API's request for a generation takes the same path.

    body -> Call -> Generator.generate() ---> JSON, or server-sent events
                           |
                           +-- closed at the end, on an error, and when the client leaves

An error before a stream's headers (event_stream.py) has a status; a later one is an event.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Generic

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.observe import log_lines
from services.router import callers
from services.router.dialects.dialect import MODEL, Answer, Call, CallT, Dialect, Envelope, Json
from services.router.dialects.json_body import InvalidParameter
from services.router.http.body_reader import BodyReader, read_timeout_s
from services.router.http.event_stream import COMMENT, EventStream, sse, until_disconnect
from services.router.models import Models
from services.router.request.answers import HeldLogprobs, merged
from services.router.request.generation import Generator
from services.values.errors import Aborted, Forbidden, InvalidRequest, NotFound, ProtocolError
from services.wire.generation_messages import JoinedResponses, PackedIds
from services.wire.isthmus.v1.common_pb2 import FINISH_REASON_ABORTED
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse

_PROMPT_TOKEN_IDS = GenerateResponse.PROMPT_TOKEN_IDS_FIELD_NUMBER


async def generate_all(
    generate: Callable[[GenerateRequest], AsyncGenerator[GenerateResponse, None]],
    requests: Sequence[GenerateRequest],
    answers_each: int,
) -> AsyncGenerator[GenerateResponse, None]:
    """Yield the responses of all requests as if they were one request's answers, prompt by prompt.

    An error of one request closes the others and is raised. Raises Aborted where one was aborted.
    """
    sources = [generate(request) for request in requests]
    async with aclosing(merged(sources)) as responses:
        async for place, response in responses:
            if response.finish.reason == FINISH_REASON_ABORTED:
                raise Aborted("the request was aborted before its answers were complete")
            response.index += place * answers_each
            response.request_id = requests[0].request_id or response.request_id
            yield response


# Writing these takes some ten milliseconds, which would delay all streams of the loop.
_MANY_LOGPROBS = 1 << 14


async def whole(
    answer: Answer,
    responses: AsyncGenerator[GenerateResponse, None],
    num_answers: int = 1,
    answers_each: int = 1,
) -> Json | list[Json]:
    """Return all answers as one JSON value, and close `responses`. Raises InvalidRequest for too many
    log-probabilities."""
    answers = [JoinedResponses() for _ in range(num_answers)]
    held = HeldLogprobs(times_prompt=answers_each)
    async with aclosing(responses):
        async for response in responses:
            held.add(response)
            answers[response.index].add(response)
    _check_finished(sum(each.has_finished for each in answers), num_answers)
    wholes = [each.whole() for each in answers]
    if held.count < _MANY_LOGPROBS:
        return answer.whole(wholes)
    return await asyncio.to_thread(answer.whole, wholes)


async def events(
    answer: Answer, responses: AsyncGenerator[GenerateResponse, None], num_answers: int = 1
) -> AsyncGenerator[bytes, None]:
    num_finished = 0
    async with aclosing(responses):
        async for response in responses:
            num_finished += response.HasField("finish")
            for event in answer.events(response):
                yield sse(event)
    _check_finished(num_finished, num_answers)


def _check_finished(num_finished: int, num_answers: int) -> None:
    if num_finished < num_answers:
        raise ProtocolError("the generation ended without a finish")


log = logging.getLogger(__name__)


class Generating(Generic[CallT]):
    def __init__(
        self,
        dialect: Dialect[CallT],
        models: Models,
        bodies: BodyReader,
        clock: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        self._dialect = dialect
        self._models = models
        self._bodies = bodies
        self._clock = clock
        self._count = count

    async def answer(self, request: Request) -> Response:
        self._count(self._dialect.name)
        try:
            timeout_s = read_timeout_s(request.headers)
            call = await self._bodies.read(request, self._dialect.read)
            for each in call.requests:
                each.tenant = callers.current().tenant_of(each.tenant)
            self._dialect.complete(call)
            envelope = self._envelope(call)
            is_alias = self._models.is_alias(call.request.model)
            model = self._models.take(*call.requests, past=partial(self._dialect.past, call))
            if call.more:
                model.generator.check_together(call.request.tenant, len(call.requests))
            answer = self._dialect.answer(call, envelope, model.generator)
        except (InvalidRequest, NotFound, Forbidden) as error:
            (kind,) = (kind for kind in (InvalidRequest, NotFound, Forbidden) if isinstance(error, kind))
            self._models.rejected(kind(str(error)))  # The gRPC service counts it under the same name.
            raise
        _log_left_out(call)
        responses = self._responses(model.generator, call, answer.request, timeout_s)
        headers = {MODEL: call.request.model} if is_alias else None
        if call.constraint_param:
            responses = _naming_constraint(responses, call.constraint_param)
        if call.stream:
            return EventStream(
                events(answer, responses, call.num_answers),
                time_limit_s=model.generator.time_limit_s(timeout_s),
                failure=lambda error: map(sse, answer.failure(error)),
                ping=sse(answer.ping) if answer.ping is not None else COMMENT,
                headers=headers,
            )
        answered = whole(answer, responses, call.num_answers, call.answers_each)
        return JSONResponse(await until_disconnect(request.receive, answered), headers=headers)

    def _responses(
        self, generator: Generator, call: CallT, first: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        generate = partial(_generate, generator, call, timeout_s=timeout_s)
        if not call.more:
            return generate(first)
        return generate_all(generate, (first, *call.more), call.answers_each)

    def _envelope(self, call: Call) -> Envelope:
        model = call.request.model or self._models.default.name
        return Envelope(secrets.token_hex(16), model, int(self._clock()))


def _generate(
    generator: Generator, call: Call, request: GenerateRequest, timeout_s: float | None
) -> AsyncGenerator[GenerateResponse, None]:
    generate = partial(generator.generate, callers.own(request), timeout_s, call.traceparent)
    scores = request.sampling.HasField("prompt_logprobs")  # Log-probabilities of a prompt hold no ids.
    return _with_prompt(generate) if call.reports_prompt or scores else generate()


async def _with_prompt(
    generate: Callable[..., AsyncGenerator[GenerateResponse, None]],
) -> AsyncGenerator[GenerateResponse, None]:
    prompts: list[PackedIds] = []
    async with aclosing(generate(report_prompt=prompts.append)) as responses:
        async for response in responses:
            if prompts:
                response.MergeFromString(prompts.pop().field(_PROMPT_TOKEN_IDS))
            yield response


async def _naming_constraint(
    responses: AsyncGenerator[GenerateResponse, None], param: str
) -> AsyncGenerator[GenerateResponse, None]:
    """Yield the responses. An error in the constraint names the parameter that the body has."""
    async with aclosing(responses):
        try:
            async for response in responses:
                yield response
        except InvalidRequest as error:
            if not error.field.startswith("sampling.constraint"):
                raise
            raise InvalidParameter(param, error.problem.lstrip(",: ")) from error


def _log_left_out(call: Call) -> None:
    if call.left_out:
        names = ",".join(call.left_out)
        log_lines.event(log, "left_out", request_id=call.request.request_id, names=names)
