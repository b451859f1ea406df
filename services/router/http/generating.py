"""One call for a generation, whichever API it is made by.

    body -> Call -> Generator.generate() ---> JSON, or server-sent events
                           |
                           +-- closed at the end, on an error, and when the client leaves

An error before the headers of a stream (event_stream.py) has a status, one after them is an event of its own.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Generic

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.observe import log_lines
from services.router.dialects.body import InvalidParameter
from services.router.dialects.call import Call
from services.router.dialects.dialect import CallT, Dialect, Envelope
from services.router.http.answering import events, whole
from services.router.http.body import BodyReader, read_timeout_s
from services.router.http.event_stream import COMMENT, EventStream, sse, until_disconnect
from services.router.http.prompt_lists import generate_all
from services.router.keys import callers
from services.router.request.generation import Generator
from services.values.errors import Forbidden, InvalidRequest, NotFound
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse
from services.wire.packed_ids import PackedIds

_PROMPT_TOKEN_IDS = GenerateResponse.PROMPT_TOKEN_IDS_FIELD_NUMBER

log = logging.getLogger(__name__)


class Generating(Generic[CallT]):
    """An endpoint. `clock` gives seconds since the epoch, `count` is told the dialect's name."""

    def __init__(
        self,
        dialect: Dialect[CallT],
        generation: Generator,
        bodies: BodyReader,
        clock: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        self._dialect = dialect
        self._generation = generation
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
            answer = self._dialect.answer(call, await self._envelope(call))
        except (InvalidRequest, NotFound, Forbidden) as error:
            (kind,) = (kind for kind in (InvalidRequest, NotFound, Forbidden) if isinstance(error, kind))
            self._generation.rejected(kind(str(error)))  # by the name that all fronts count it by
            raise
        _tell_left_out(call)
        responses = self._responses(call, answer.request, timeout_s)
        if call.constraint_param:
            responses = _naming_constraint(responses, call.constraint_param)
        if call.stream:
            return EventStream(
                events(answer, responses, call.num_answers),
                time_limit_s=self._generation.time_limit_s(timeout_s),
                failure=lambda error: map(sse, answer.failure(error)),
                ping=sse(answer.ping) if answer.ping is not None else COMMENT,
            )
        told_whole = whole(answer, responses, call.num_answers, call.answers_each)
        return JSONResponse(await until_disconnect(request.receive, told_whole))

    def _responses(
        self, call: CallT, first: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        generate = partial(self._generate, call, timeout_s=timeout_s)
        if not call.more:
            return generate(first)
        return generate_all(generate, (first, *call.more), call.answers_each)

    def _generate(
        self, call: CallT, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        generate = partial(self._generation.generate, callers.own(request), timeout_s, call.traceparent)
        scores = request.sampling.HasField("prompt_logprobs")  # which name no ids
        return _with_prompt(generate) if call.tells_prompt or scores else generate()

    async def _envelope(self, call: Call) -> Envelope:
        model = call.request.model or only_model(self._generation)
        return Envelope(secrets.token_hex(16), model, int(self._clock()))


def only_model(generation: Generator) -> str:
    models = generation.list_models().models
    return models[0].id if models else ""


async def _with_prompt(
    generate: Callable[..., AsyncGenerator[GenerateResponse, None]],
) -> AsyncGenerator[GenerateResponse, None]:
    """Put the prompt's ids in the first response. `generate` is Generator's."""
    prompts: list[PackedIds] = []
    async with aclosing(generate(tell_prompt=prompts.append)) as responses:
        async for response in responses:
            if prompts:
                response.MergeFromString(prompts.pop().field(_PROMPT_TOKEN_IDS))
            yield response


async def _naming_constraint(
    responses: AsyncGenerator[GenerateResponse, None], param: str
) -> AsyncGenerator[GenerateResponse, None]:
    """What is wrong with it is told by what the body calls it: several names have the same meaning."""
    async with aclosing(responses):
        try:
            async for response in responses:
                yield response
        except InvalidRequest as error:
            if not error.field.startswith("sampling.constraint"):
                raise
            raise InvalidParameter(param, error.problem.lstrip(",: ")) from error


def _tell_left_out(call: Call) -> None:
    if call.left_out:
        names = ",".join(call.left_out)
        log_lines.event(log, "left_out", request_id=call.request.request_id, names=names)
