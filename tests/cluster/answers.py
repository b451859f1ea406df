"""The answers to requests that ask for several."""

import asyncio
from dataclasses import dataclass, field

from services.wire.isthmus.v1 import generation_pb2


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    responses: int = 0
    finish: generation_pb2.Finish | None = None

    @property
    def ranks(self):
        """Decode ranks that it was with, in order."""
        return [placement.decode.worker for placement in self.finish.placements]


async def answers_of(cluster, request, timeout=30, answers=None):
    """When the stream has ended; `answers`, by index, fill meanwhile. None says more behind its finish."""
    answers = {} if answers is None else answers
    async for response in cluster.stubs[0].Generate(request, timeout=timeout):
        answer = answers.setdefault(response.index, Answer())
        assert answer.finish is None
        answer.token_ids += response.token_ids
        answer.text += response.text
        answer.logprobs += [token.chosen.logprob for token in response.logprobs]
        answer.responses += 1
        if response.HasField("finish"):
            answer.finish = response.finish
    return [answers[index] for index in range(len(answers))]


async def running_at(cluster, number, roles=("decode",), timeout_s=20.0):
    """The rank that has so many sequences at once, as soon as one has."""
    ranks = [rank for name, rank in cluster.ranks.items() if name.startswith(roles)]
    async with asyncio.timeout(timeout_s):
        while True:
            for rank in ranks:
                if rank.engine.load().running >= number:
                    return rank
            await asyncio.sleep(0.002)
