"""Several answers to one prompt have separate ranks, seeds and ends.

An error of one answer is the request's, and the others are stopped: a call has one status, and an answer must
not be silently missing.

HeldLogprobs limits the log-probabilities that are held for a client that gets all of them at once. Streams
are merged into one that has each item as it arrives.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.router.request.client_request import ClientRequest
from services.router.request.failover import AnswerContext
from services.router.request.progress import Progress
from services.router.request.response_stream import ResponseStream
from services.router.request.story import log_answer
from services.values.errors import InvalidRequest
from services.wire.generation_messages import JoinedResponses
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse, Totals

MOST_HELD = 1 << 20  # Each takes some hundred bytes, and as much again as JSON.


class HeldLogprobs:
    """This counts the log-probabilities of a call's answers: each token, and the others reported with it."""

    def __init__(self, times_prompt: int = 1, most: int | None = None) -> None:
        """A prompt's log-probabilities are sent `times_prompt` times."""
        self._times_prompt = times_prompt
        self._most = MOST_HELD if most is None else most
        self.count = 0

    def add(self, response: GenerateResponse) -> None:
        self.count += _count(response.prompt_logprobs) * self._times_prompt + _count(response.logprobs)
        if self.count > self._most:
            raise InvalidRequest(
                "sampling.logprobs",
                "must be requested for fewer tokens, or for fewer others, or streamed: a "
                f"call that is answered as a whole reports {self._most} of them, including those of prompts",
            )


def _count(logprobs: Sequence[TokenLogprobs]) -> int:
    """Count the log-probabilities; all tokens have as many others as the first."""
    return len(logprobs) * (1 + len(logprobs[0].top)) if logprobs else 0


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None = None


async def merged(sources: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Yield each item with its source's index, and close all sources.

    A slow reader delays them: each has at most one item that was not taken. The first error is raised, after
    the items before it.
    """
    items = asyncio.Queue[tuple[int, _T | _End]](maxsize=1)
    pumps = [asyncio.create_task(_pump(place, source, items)) for place, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            place, item = await items.get()
            if not isinstance(item, _End):
                yield place, item
            elif item.error is not None:
                raise item.error
            else:
                running -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    place: int, source: AsyncGenerator[_T, None], items: "asyncio.Queue[tuple[int, _T | _End]]"
) -> None:
    end = _End()
    try:
        async with aclosing(source):
            async for item in source:
                await items.put((place, item))
    except Exception as error:
        end = _End(error)
    await items.put((place, end))


MAX_ANSWERS = 128


class SeveralAnswers:
    def __init__(self, context: AnswerContext, progress: Progress) -> None:
        self._context = context
        progress.split()
        self._responses = merged([self._answer(each) for each in progress.answers])

    async def next_response(self) -> GenerateResponse:
        _, response = await anext(self._responses)
        return response

    async def aclose(self) -> None:
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
            log_answer(progress, outcome)


class BestAnswers:
    """The best answers are sent when all have ended, each in one response. The prompt's log-probabilities are
    sent before them as they arrive, as they may exceed one message."""

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
        """Name best_of in the error where an engine has no log-probabilities, if only best_of needs them."""
        try:
            yield
        except InvalidRequest as error:
            if self._request.tells_logprobs or error.field != "sampling.logprobs":
                raise
            raise InvalidRequest(f"best_of ranks answers by their log-probabilities: {error}") from error

    async def _read(self) -> GenerateResponse | None:
        while self._unfinished:
            response = await self._answers.next_response()
            reported = GenerateResponse(
                request_id=response.request_id, prompt_logprobs=response.prompt_logprobs
            )
            response.ClearField("prompt_logprobs")
            if self._request.tells_logprobs:
                self._held.add(response)
            self._joined[response.index].add(response)
            self._unfinished -= response.HasField("finish")
            if reported.prompt_logprobs:
                return reported
        return None

    def _chosen(self) -> list[GenerateResponse]:
        """Return the best answers first, with new indexes; the last reports the totals of the others."""
        answers = [each.whole() for each in self._joined]
        ranked = sorted(answers, key=mean_logprob, reverse=True)  # Equal ones keep their order.
        best, left_out = ranked[: self._request.answered], ranked[self._request.answered :]
        for index, answer in enumerate(best):
            answer.index = index
            if not self._request.tells_logprobs:
                del answer.logprobs[:]
        best[-1].finish.left_out.CopyFrom(_sums([answer.finish.totals for answer in left_out]))
        return best


def mean_logprob(answer: GenerateResponse) -> float:
    logprobs = [token.chosen.logprob for token in answer.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _sums(totals: Sequence[Totals]) -> Totals:
    names = [field.name for field in Totals.DESCRIPTOR.fields]
    return Totals(**{name: sum(getattr(each, name) for each in totals) for name in names})


class Answers(Protocol):
    async def next_response(self) -> GenerateResponse:
        """Return a response of any answer, until each has had its last. Raises as FailoverStream.next."""

    async def aclose(self) -> None: ...


def counts_of(request: GenerateRequest) -> tuple[int, int]:
    """Return how many answers are generated, and how many of them the client gets. Raises InvalidRequest."""
    answered = request.n if request.HasField("n") else 1
    answers = request.best_of if request.HasField("best_of") else answered
    if not 1 <= answered <= MAX_ANSWERS:
        raise InvalidRequest(f"n must be between 1 and {MAX_ANSWERS}, got {answered}")
    if not answered <= answers <= MAX_ANSWERS:
        raise InvalidRequest(f"best_of must be between n, {answered}, and {MAX_ANSWERS}, got {answers}")
    return answers, answered


def answers_to(context: AnswerContext, progress: Progress) -> Answers:
    """Return the answers to an encoded request; the caller closes them."""
    request = progress.request
    if request.answers == 1:
        return ResponseStream(context, progress)
    several = SeveralAnswers(context, progress)
    return several if request.answered == request.answers else BestAnswers(several, request)
