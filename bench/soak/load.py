"""This module makes the load of bench.soak and counts its answers."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from bench.soak.ranks import Ranks
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

CLIENTS = 96
DEADLINE_S = 20.0
ABORTED_SHARE = 1 / 12
QUIET_ABORTS = 20
QUIET_ATTEMPTS = 3 * QUIET_ABORTS
QUIET_TOKENS = 3000  # asked for by what is to be aborted: seconds of any engine's work
KEPT_ANSWERS = 60
CLEAN = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED})  # under load
MAX_CONVERSATION = 900  # tokens; then its place is taken by a new one


class Mix:
    """Draws the next request."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._systems = [self._ids(256) for _ in range(6)]
        self._conversations = [self._ids(40) for _ in range(24)]

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(500) for _ in range(length)]

    def draw(self) -> "Asked":
        kind = self._rng.choices(["turn", "group", "scan", "short"], [40, 30, 20, 10])[0]
        max_tokens = self._rng.randint(4, 64)
        if kind == "turn":
            index = self._rng.randrange(len(self._conversations))
            ids = [*self._conversations[index], *self._ids(self._rng.randint(8, 24))]
            return Asked(kind, ids, max_tokens, index)
        if kind == "group":
            return Asked(kind, [*self._rng.choice(self._systems), *self._ids(32)], max_tokens)
        return Asked(
            kind, self._ids(self._rng.randint(*((100, 500) if kind == "scan" else (5, 20)))), max_tokens
        )

    def answered(self, asked: "Asked", tokens: list[int]) -> None:
        if asked.conversation is not None:
            history = [*asked.ids, *tokens]
            self._conversations[asked.conversation] = (
                history if len(history) < MAX_CONVERSATION else self._ids(40)
            )


@dataclass(frozen=True)
class Asked:
    kind: str
    ids: list[int]
    max_tokens: int
    conversation: int | None = None

    @property
    def request(self) -> generation_pb2.GenerateRequest:
        name = f"soak-{self.conversation}" if self.conversation is not None else ""
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=self.ids),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True),
            conversation_id=name,
        )


@dataclass
class Outcomes:
    """Errors that are `clean` are counted, and are none otherwise."""

    clean: frozenset[grpc.StatusCode] = CLEAN
    counts: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)  # until the refusal came
    errors: list[str] = field(default_factory=list)


def late_share(outcomes: Iterable[Outcomes]) -> float | None:
    """Return the share that deadlines ended of the requests that were let in and waited for, or None where
    none was."""
    counts = sum((one.counts for one in outcomes), Counter[str]())
    late = counts["deadline_exceeded"]
    let_in = counts["answered"] + late
    return late / let_in if let_in else None


class Soak:
    """`expected(ids, num_tokens)` is what must be generated; None: nobody knows beforehand."""

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationStub,
        ranks: Ranks,
        rng: random.Random,
        expected: Callable[[list[int], int], list[int]] | None,
    ) -> None:
        self.stub, self.ranks, self.rng, self.expected = stub, ranks, rng, expected
        self.mix = Mix(rng)
        self._kept: list[tuple[Asked, list[int]]] = []
        self._num_answered = 0

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    async def ask(self, asked: Asked, outcomes: Outcomes, abort_after_s: float | None) -> bool:
        """True when it was aborted: it was under way still when its client had waited for so long."""
        call = self.stub.Generate(asked.request, timeout=DEADLINE_S)
        tokens: list[int] = []
        aborted = False
        began = time.monotonic()
        try:
            async with asyncio.timeout(abort_after_s):
                async for response in call:
                    if not tokens and response.token_ids:
                        outcomes.ttft_s.append(time.monotonic() - began)
                    tokens.extend(response.token_ids)
        except TimeoutError:
            call.cancel()
            aborted = True
            outcomes.counts["aborted"] += 1
        except grpc.aio.AioRpcError as error:
            outcomes.counts[error.code().name.lower()] += 1
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                outcomes.refused_s.append(time.monotonic() - began)
            if error.code() not in outcomes.clean:
                outcomes.errors.append(f"{error.code().name}: {error.details()}")
        else:
            outcomes.counts["answered"] += 1
            self.mix.answered(asked, tokens)
            self._keep(asked, tokens)
            if len(tokens) != asked.max_tokens:
                outcomes.errors.append(f"{len(tokens)} tokens of {asked.max_tokens}")
        if self.expected is not None and tokens != self.expected(asked.ids, len(tokens)):
            outcomes.errors.append(f"wrong tokens after a {asked.kind} prompt of {len(asked.ids)}")
        return aborted

    def _keep(self, asked: Asked, tokens: list[int]) -> None:
        """Each answer with the same chance (algorithm R), where nobody knows what it should have been."""
        self._num_answered += 1
        if self.expected is not None:
            return
        if len(self._kept) < KEPT_ANSWERS:
            self._kept.append((asked, tokens))
        elif (place := self.rng.randrange(self._num_answered)) < KEPT_ANSWERS:
            self._kept[place] = asked, tokens

    async def ask_again(self, outcomes: Outcomes) -> int:
        """Return how many of the kept answers come out otherwise when nothing else runs."""
        otherwise = 0
        for asked, tokens in self._kept:
            call = self.stub.Generate(asked.request, timeout=DEADLINE_S)
            try:
                again = [token async for response in call for token in response.token_ids]
            except grpc.aio.AioRpcError as error:
                outcomes.errors.append(f"{error.code().name}: {error.details()}")
            else:
                otherwise += again != tokens
        return otherwise

    def _abort_after_s(self) -> float | None:
        return self.rng.uniform(0.0, 2.0) if self.rng.random() < ABORTED_SHARE else None

    async def closed_loop(self, seconds: float, outcomes: Outcomes) -> float:
        """Requests answered per second, with CLIENTS at a time."""
        began = time.monotonic()

        async def client() -> None:
            while time.monotonic() < began + seconds:
                await self.ask(self.mix.draw(), outcomes, None)

        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(client())
        return outcomes.counts["answered"] / (time.monotonic() - began)

    async def open_loop(self, seconds: float, rate: float, outcomes: Outcomes) -> None:
        """Poisson arrivals; those that are late because we were are made up for."""
        due = time.monotonic()
        end = due + seconds
        async with asyncio.TaskGroup() as requests:
            while (due := due + self.rng.expovariate(rate)) < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                requests.create_task(self.ask(self.mix.draw(), outcomes, self._abort_after_s()))

    async def quiet_aborts(self, outcomes: Outcomes) -> list[float]:
        """Seconds from each abort until no rank holds anything.

        Those that ended before they could be aborted are left out, and others asked for in their place.
        """
        seconds: list[float] = []
        for _ in range(QUIET_ATTEMPTS):
            asked = Asked("scan", [self.rng.randrange(500) for _ in range(400)], QUIET_TOKENS)
            aborted = await self.ask(asked, outcomes, self.rng.uniform(0.0, 1.2))
            let_go_s = await self.ranks.let_go()
            if aborted:
                seconds.append(let_go_s)
            if len(seconds) == QUIET_ABORTS:
                break
        return seconds
