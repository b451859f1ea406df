"""The best of several answers: those whose tokens are the most probable on average."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.router.request.answers.held_logprobs import HeldLogprobs
from services.router.request.answers.several import SeveralAnswers
from services.router.request.client_request import ClientRequest
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse, Totals
from services.wire.joined_responses import JoinedResponses


class BestAnswers:
    """As SeveralAnswers, but none is heard before all of them have ended: each then in one response. What is
    told of the prompt goes before them as it comes, for it may be more than one message holds."""

    def __init__(self, answers: SeveralAnswers, request: ClientRequest) -> None:
        self._answers = answers
        self._request = request
        self._joined = [JoinedResponses() for _ in range(request.answers)]
        self._held = HeldLogprobs()
        self._unfinished = request.answers
        self._best: Iterator[GenerateResponse] | None = None

    async def next_response(self) -> GenerateResponse:
        if self._best is None:
            with self._naming_best_of():
                of_prompt = await self._read()
            if of_prompt is not None:
                return of_prompt
            self._best = iter(self._chosen())
        return next(self._best)

    async def aclose(self) -> None:
        await self._answers.aclose()

    @contextmanager
    def _naming_best_of(self) -> Iterator[None]:
        """Nobody has asked for log-probabilities whose want could be told."""
        try:
            yield
        except InvalidRequest as error:
            if self._request.tells_logprobs or error.field != "sampling.logprobs":
                raise
            raise InvalidRequest(f"best_of ranks answers by their log-probabilities: {error}") from error

    async def _read(self) -> GenerateResponse | None:
        """What is told of the prompt next, which is no answer's own; None: all answers have ended."""
        while self._unfinished:
            response = await self._answers.next_response()
            told = GenerateResponse(request_id=response.request_id, prompt_logprobs=response.prompt_logprobs)
            response.ClearField("prompt_logprobs")
            if self._request.tells_logprobs:
                self._held.add(response)
            self._joined[response.index].add(response)
            self._unfinished -= response.HasField("finish")
            if told.prompt_logprobs:
                return told
        return None

    def _chosen(self) -> list[GenerateResponse]:
        """Numbered anew, best first; the last one says what the others took."""
        answers = [each.whole() for each in self._joined]
        ranked = sorted(answers, key=mean_logprob, reverse=True)  # those that are equal stay in their order
        best, left_out = ranked[: self._request.answered], ranked[self._request.answered :]
        for index, answer in enumerate(best):
            answer.index = index
            if not self._request.tells_logprobs:
                del answer.logprobs[:]
        best[-1].finish.left_out.CopyFrom(_sums([answer.finish.totals for answer in left_out]))
        return best


def mean_logprob(answer: GenerateResponse) -> float:
    """Of its tokens; of one that has none it is as low as can be."""
    logprobs = [token.chosen.logprob for token in answer.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _sums(totals: Sequence[Totals]) -> Totals:
    names = [field.name for field in Totals.DESCRIPTOR.fields]
    return Totals(**{name: sum(getattr(each, name) for each in totals) for name in names})
