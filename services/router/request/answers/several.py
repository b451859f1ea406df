"""Several answers to one prompt, each with ranks, a seed and an end of its own.

An error of one is the request's: the others are given up. For a call has one status, and an answer that were
missing without a word would be lost.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from services.router.request.answer_context import AnswerContext
from services.router.request.answers.merged import merged
from services.router.request.answers.response_stream import ResponseStream
from services.router.request.progress import Progress
from services.router.request.telemetry.story import tell_answer
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse


class SeveralAnswers:
    """As ResponseStream, which it has one of for each; `progress` is the first one's."""

    def __init__(self, context: AnswerContext, progress: Progress) -> None:
        self._context = context
        progress.split()
        self._responses = merged([self._answer(each) for each in progress.answers])

    async def next_response(self) -> GenerateResponse:
        """Of whichever answer has said something. Raises as ResponseStream.next_response."""
        _, response = await anext(self._responses)
        return response

    async def aclose(self) -> None:
        """None of them runs any more."""
        await self._responses.aclose()

    async def _answer(self, progress: Progress) -> AsyncGenerator[GenerateResponse, None]:
        with self._ending(progress):
            stream = ResponseStream(self._context, progress)
            response = await stream.next_response()
            while not response.HasField("finish"):
                yield response
                response = await stream.next_response()
        yield response

    @contextmanager
    def _ending(self, progress: Progress) -> Iterator[None]:
        outcome = "finished"
        try:
            yield
        except Exception as error:
            outcome = type(error).__name__
            raise
        except BaseException:
            outcome = "cancelled"
            raise
        finally:
            progress.leave()
            self._context.cluster.ended(progress.request.answer_key)
            tell_answer(progress, outcome)
