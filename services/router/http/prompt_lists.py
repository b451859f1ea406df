"""A list of prompts: each a request of its own, all started together and answered as one."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from services.router.request.answers.merged import merged
from services.values.errors import Aborted
from services.wire.isthmus.v1.common_pb2 import FINISH_REASON_ABORTED
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse


async def generate_all(
    generate: Callable[[GenerateRequest], AsyncGenerator[GenerateResponse, None]],
    requests: Sequence[GenerateRequest],
    answers_each: int,
) -> AsyncGenerator[GenerateResponse, None]:
    """As `generate`, Generator's, of one request that has all their answers, prompt by prompt. An
    error of one is raised, and the others are given up; Aborted where somebody stopped one."""
    sources = [generate(request) for request in requests]
    async with aclosing(merged(sources)) as responses:
        async for place, response in responses:
            if response.finish.reason == FINISH_REASON_ABORTED:
                raise Aborted("the request was aborted before its answers were complete")
            response.index += place * answers_each
            response.request_id = requests[0].request_id or response.request_id
            yield response
