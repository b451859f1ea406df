"""Responses of the router as an API's answer: joined to a whole, or events as they come."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from services.router.dialects.answer import Answer, Json
from services.router.http.event_stream import COMMENT, SILENCE_S, sse
from services.values.errors import IsthmusError, ProtocolError
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse


async def whole(answer: Answer, responses: AsyncGenerator[GenerateResponse, None]) -> Json:
    """Closes `responses`."""
    joined = GenerateResponse()
    texts, reasonings = [], []
    async with aclosing(responses):
        async for response in responses:
            texts.append(response.text)
            reasonings.append(response.reasoning)
            joined.MergeFrom(response)  # the lists grow; texts and finish are replaced
    _check_finished(joined)
    joined.text, joined.reasoning = "".join(texts), "".join(reasonings)
    return answer.whole(joined)


async def events(
    answer: Answer,
    responses: AsyncGenerator[GenerateResponse, None],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events; an error before the first of them is raised. Closes `responses`.

    While a call of a tool is written there is nothing to tell until it is whole: a comment now and again.
    """
    started, said_s = False, clock()
    response = GenerateResponse()
    try:
        async with aclosing(responses):
            async for response in responses:
                said = [sse(event) for event in answer.events(response)]
                if not said and clock() - said_s >= SILENCE_S:
                    said = [COMMENT]
                for each in said:
                    started, said_s = True, clock()
                    yield each
        _check_finished(response)
    except Exception as error:
        if not started:
            raise
        for event in answer.failure(error):
            yield sse(event)
        if not isinstance(error, IsthmusError):
            raise


def _check_finished(last: GenerateResponse) -> None:
    if not last.HasField("finish"):
        raise ProtocolError("the generation ended without a finish")
