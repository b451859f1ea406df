"""Engines with and without drafts on the same conversations, in turns."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from bench.speculative.workload import Conversation, TokenIds, request
from services.values.rank import Plan
from services.values.request import GenerationRequest, Output

Generate = Callable[[GenerationRequest], AsyncIterator[Output]]


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    moved_bytes: int = 0

    @property
    def decode_s(self) -> float:
        return self.last_s - self.first_s

    @property
    def itl_s(self) -> float:
        return self.decode_s / max(1, len(self.ids) - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """All conversations run at once."""

    answers: list[Answer]
    batch: int

    @property
    def tokens_per_s(self) -> float:
        decode_s = sum(answer.decode_s for answer in self.answers)
        return self.batch * sum(len(answer.ids) - 1 for answer in self.answers) / decode_s

    @property
    def texts(self) -> list[list[int]]:
        return [answer.ids for answer in self.answers]


async def run(
    generate: Generate, conversations: Sequence[Conversation], answer_tokens: int, plan: Plan
) -> Run:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_converse(generate, conversation, answer_tokens, plan))
            for conversation in conversations
        ]
    answers = [answer for task in tasks for answer in task.result()]
    return Run(answers, len(conversations))


async def _converse(
    generate: Generate, conversation: Conversation, answer_tokens: int, plan: Plan
) -> list[Answer]:
    history: TokenIds = ()
    answers = []
    for turn, question in enumerate(conversation.questions):
        history += question
        name = f"{conversation.salt}-{conversation.seed}-{turn}"
        answers.append(await _answer(generate, request(name, conversation, history, answer_tokens, plan)))
        history += tuple(token_id for token_id in answers[-1].ids if token_id not in conversation.ends)
    return answers


async def _answer(generate: Generate, asked: GenerationRequest) -> Answer:
    answer = Answer()
    async for output in generate(asked):
        answer.last_s = time.monotonic()
        if output.admitted is not None:
            answer.first_s = answer.last_s
            answer.prompt_tokens = output.admitted.prompt_tokens
            answer.hit_tokens = output.admitted.decode_prefix_len
            answer.moved_bytes = output.admitted.kv_bytes_moved
        answer.ids += output.token_ids
    return answer
