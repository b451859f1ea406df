"""Several answers to one prompt, each with ranks, a seed and an end of its own.

An error of one is the request's: the others are given up. For a call has one status, and an answer that were
missing without a word would be lost.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from services.router.request.answers.merged import merged
from services.router.request.answers.prompt_turns import PromptTurns
from services.router.request.answers.response_stream import Means, ResponseStream
from services.router.request.answers.seeds import seed_of
from services.router.request.progress import Checked, Progress
from services.router.request.telemetry.story import tell_answer
from services.router.text.chats.past_answers import PastAnswers
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse
from services.wire.packed_ids import PackedIds


class SeveralAnswers:
    """As ResponseStream, which it has one of for each; `progress` is the first one's."""

    def __init__(
        self,
        means: Means,
        checked: Checked,
        prompt: PackedIds,
        past: PastAnswers | None,
        progress: Progress,
        deadline: float,
    ) -> None:
        self._means = means
        self._checked = checked
        self._parts = prompt, past, deadline
        progress.turns = PromptTurns()
        progress.others = [progress.another(index) for index in range(1, checked.answers)]
        self._responses = merged([self._answer(each) for each in progress.answers])

    async def next_response(self) -> GenerateResponse:
        """Of whichever answer has said something. Raises as ResponseStream.next_response."""
        _, response = await anext(self._responses)
        return response

    async def aclose(self) -> None:
        """None of them runs any more."""
        await self._responses.aclose()

    async def _answer(self, progress: Progress) -> AsyncGenerator[GenerateResponse, None]:
        prompt, past, deadline = self._parts
        checked = self._of(progress.index)
        with self._ending(checked, progress):
            stream = ResponseStream(self._means, checked, prompt, past, progress, deadline)
            response = await stream.next_response()
            while not response.HasField("finish"):
                yield response
                response = await stream.next_response()
        yield response

    def _of(self, index: int) -> Checked:
        sampling = self._checked.sampling
        sampling = replace(sampling, seed=seed_of(sampling.seed, index))
        if index:
            sampling = sampling.without_prompt_logprobs
        return replace(self._checked, sampling=sampling, index=index)

    @contextmanager
    def _ending(self, checked: Checked, progress: Progress) -> Iterator[None]:
        """When it has ended, whichever way, it holds nothing and the others need not wait for it."""
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
            stream, progress.stream = progress.stream, None
            if stream is not None:
                stream.close()
            self._means.cluster.ended(checked.answer_key)
            assert progress.turns is not None
            progress.turns.leave(progress.index)
            tell_answer(progress, outcome)
