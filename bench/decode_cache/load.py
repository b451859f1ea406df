"""Drives one side with a workload in a closed loop, and notes what a client sees and what the rank holds."""

import asyncio
import logging
import random
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from bench.decode_cache.ranks import DecodeSide
from bench.decode_cache.workload import Conversation, TokenIds, Workload, prompt_of
from services.values.errors import IsthmusError
from services.values.request import Admitted, GenerationRequest, SamplingParams

log = logging.getLogger(__name__)

_SAMPLE_EVERY_S = 0.02


@dataclass(slots=True)
class Turn:
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    admitted: Admitted | None = None
    rejected: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def ended(self) -> bool:
        return not self.rejected and self.admitted is not None


@dataclass(frozen=True, slots=True)
class RankSample:
    """The decode rank at one moment."""

    at_s: float
    running: int
    waiting: int
    used_share: float  # of the pool: neither free nor only cached


@dataclass(slots=True)
class Run:
    """A workload on one side, in the order in which turns were sent."""

    workload: Workload
    turns: list[Turn] = field(default_factory=list)
    samples: list[RankSample] = field(default_factory=list)
    retractions: int = 0  # of the decode rank; what each evicts is computed again

    @property
    def counted(self) -> list[Turn]:
        return [turn for turn in self.turns[self.workload.ramp :] if turn.ended]

    @property
    def window_s(self) -> tuple[float, float]:
        """Return the seconds for which the system was full: from the first turn that counts until the last
        one was sent."""
        return self.turns[self.workload.ramp].sent_s, self.turns[-1].sent_s


async def drive(side: DecodeSide, workload: Workload, seed: int) -> Run:
    """All turns. Which conversation goes next is drawn, but a turn waits for the one before."""
    run = Run(workload)
    waiting: deque[tuple[Conversation, list[TokenIds]]] = deque((c, []) for c in workload.conversations)
    rng = random.Random(seed)
    retractions = side.load().retractions
    sampler = asyncio.create_task(_sample(side, run.samples))
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(workload.concurrency):
                clients.create_task(_client(side, run, waiting, rng))
    finally:
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
    run.retractions = side.load().retractions - retractions
    return run


async def _client(
    side: DecodeSide,
    run: Run,
    waiting: deque[tuple[Conversation, list[TokenIds]]],
    rng: random.Random,
) -> None:
    while waiting:
        conversation, answers = waiting.popleft()
        await asyncio.sleep(_pause_s(run.workload, conversation, answers))
        turn = await _turn(side, run, conversation, answers)
        if turn.ended and len(answers) + 1 < len(conversation.questions):
            position = rng.randint(0, len(waiting))
            waiting.insert(position, (conversation, [*answers, tuple(turn.token_ids)]))


def _pause_s(workload: Workload, conversation: Conversation, answers: list[TokenIds]) -> float:
    """It is the same on both sides."""
    return random.Random(f"{conversation.name}/{len(answers)}").uniform(0, workload.pause_s)


async def _turn(side: DecodeSide, run: Run, conversation: Conversation, answers: list[TokenIds]) -> Turn:
    sampling = SamplingParams(temperature=0, max_tokens=conversation.answer_tokens, ignore_eos=True)
    request_id = f"{conversation.name}/{len(answers)}"
    request = GenerationRequest(request_id, prompt_of(conversation, answers), sampling)
    turn = Turn(sent_s=time.perf_counter())
    run.turns.append(turn)
    try:
        async for output in side.generate(request, run.workload.plans):
            turn.token_times_s += [time.perf_counter()] * len(output.token_ids)
            turn.token_ids += output.token_ids
            turn.admitted = turn.admitted or output.admitted
    except IsthmusError as error:
        log.warning("rejected request=%s error=%r", request_id, error)
        turn.rejected = True
    return turn


async def _sample(side: DecodeSide, samples: list[RankSample]) -> None:
    while True:
        load = side.load()
        used = load.books.locked + load.books.private + load.books.quarantined
        samples.append(
            RankSample(time.perf_counter(), load.running, load.waiting, used / max(1, load.books.total))
        )
        await asyncio.sleep(_SAMPLE_EVERY_S)
