"""How many answers a request asks for, and their responses as they come."""

from typing import Protocol

from services.router.request.answers.best import BestAnswers
from services.router.request.answers.response_stream import Means, ResponseStream
from services.router.request.answers.several import SeveralAnswers
from services.router.request.progress import Checked, Progress
from services.router.text.chats.past_answers import PastAnswers
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse
from services.wire.packed_ids import PackedIds

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


def answers_to(
    means: Means,
    checked: Checked,
    prompt: PackedIds,
    past: PastAnswers | None,
    progress: Progress,
    deadline: float,
) -> Answers:
    """To be closed. `progress` is the request's, `deadline` on the clock of `means`."""
    if checked.answers == 1:
        return ResponseStream(means, checked, prompt, past, progress, deadline)
    several = SeveralAnswers(means, checked, prompt, past, progress, deadline)
    return several if checked.answered == checked.answers else BestAnswers(several, checked)
