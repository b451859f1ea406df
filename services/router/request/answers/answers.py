"""How many answers a request asks for, and their responses as they come."""

from typing import Protocol

from services.router.request.answer_context import AnswerContext
from services.router.request.answers.best import BestAnswers
from services.router.request.answers.response_stream import ResponseStream
from services.router.request.answers.several import SeveralAnswers
from services.router.request.progress import Progress
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse

MAX_ANSWERS = 128


class Answers(Protocol):
    async def next_response(self) -> GenerateResponse:
        """Of any of them, until each has had its last. Raises as FailoverStream.next."""

    async def aclose(self) -> None:
        """Give up those that run."""


def counts_of(request: GenerateRequest) -> tuple[int, int]:
    """Answers to be generated, and of them those that the client gets. Raises InvalidRequest."""
    answered = request.n if request.HasField("n") else 1
    answers = request.best_of if request.HasField("best_of") else answered
    if not 1 <= answered <= MAX_ANSWERS:
        raise InvalidRequest(f"n must be between 1 and {MAX_ANSWERS}, got {answered}")
    if not answered <= answers <= MAX_ANSWERS:
        raise InvalidRequest(f"best_of must be between n, {answered}, and {MAX_ANSWERS}, got {answers}")
    return answers, answered


def answers_to(context: AnswerContext, progress: Progress) -> Answers:
    """The answers to an encoded request, to be closed."""
    request = progress.request
    if request.answers == 1:
        return ResponseStream(context, progress)
    several = SeveralAnswers(context, progress)
    return several if request.answered == request.answers else BestAnswers(several, request)
