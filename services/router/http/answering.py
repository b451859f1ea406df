"""Responses of the router as an API's answer: joined to a whole, or events as they come."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.router.dialects.answer import Answer, Json
from services.router.http.event_stream import sse
from services.router.request.answers.held_logprobs import HeldLogprobs
from services.values.errors import ProtocolError
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse
from services.wire.joined_responses import JoinedResponses

_MANY_LOGPROBS = 1 << 14  # some ten milliseconds to write down: all streams of the loop would feel it


async def whole(
    answer: Answer,
    responses: AsyncGenerator[GenerateResponse, None],
    num_answers: int = 1,
    answers_each: int = 1,
) -> Json | list[Json]:
    """Closes `responses`, which are of so many answers, so many to each prompt. Raises InvalidRequest for too
    many log-probabilities."""
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
    """Server-sent events. Closes `responses`, which are of so many answers."""
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
