"""The clients ask for conversations of several turns, greedy and sampled, some of them asked again."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bench.chaos.answers import Answer, Asked, Ended, Front
from bench.chaos.clients import Clients

CLIENTS = 8
VOCAB = range(4, 512)  # ordinary characters of the checkpoint
_MAX_CONVERSATION = 900  # tokens
_TURNS = 6
_TALKS = 4  # of each client, in turns
_CANCELLED_SHARE = 1 / 12
_ANYWHERE_SHARE = 1 / 3  # of the conversations: no name leads them home
_AGAIN_SHARE = 1 / 3  # of the requests, while there is something to ask again
_AGAIN_AT_MOST = 64


@dataclass
class _Talk:
    temperature: float
    name: str
    turns: int  # that are left
    history: tuple[int, ...] = ()


def _new_talk(rng: random.Random) -> _Talk:
    temperature, name = rng.choice((0.0, 0.0, 0.7, 1.0)), f"c{rng.getrandbits(48):x}"
    name = name if rng.random() > _ANYWHERE_SHARE else ""
    return _Talk(temperature, name, rng.randint(1, _TURNS))


@dataclass
class Load:
    """Every answer lands in `answers`."""

    clients: Clients
    seed: int
    answers: list[Answer] = field(default_factory=list)
    _again: "deque[Answer]" = field(default_factory=lambda: deque(maxlen=_AGAIN_AT_MOST))
    _count: int = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Clients ask until `ending` is set; then each ends with the answer that it waits for."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(random.Random(f"{self.seed}:client:{number}"), ending.is_set))

    async def ask_again(self) -> None:
        while self._again:
            await self._repeat(random.Random(self._count))

    async def _client(self, rng: random.Random, is_over: Callable[[], bool]) -> None:
        """Go on with one of several conversations: what they were cached for is evicted meanwhile."""
        talks = [_new_talk(rng) for _ in range(_TALKS)]
        while not is_over():
            if self._again and rng.random() < _AGAIN_SHARE:
                await self._repeat(rng)
                continue
            place = rng.randrange(_TALKS)
            if not await self._go_on(rng, talks[place]):
                talks[place] = _new_talk(rng)
            await asyncio.sleep(rng.uniform(0.0, 0.3))

    async def _go_on(self, rng: random.Random, talk: "_Talk") -> bool:
        """Have a turn; return whether there is to be another: it was answered, and is not long enough yet."""
        question = tuple(rng.choice(VOCAB) for _ in range(rng.choice((3, 20, 40, 150, 400))))
        asked = self._asked(rng, (*talk.history, *question), talk.temperature, talk.name)
        answer = await self._ask(asked)
        talk.history, talk.turns = (*asked.prompt_ids, *answer.tokens), talk.turns - 1
        is_short = talk.turns > 0 and len(talk.history) <= _MAX_CONVERSATION
        return is_short and answer.ended is Ended.FINISHED

    def _asked(self, rng: random.Random, prompt: tuple[int, ...], temperature: float, name: str) -> Asked:
        max_tokens = rng.choice((1, 8, 24, 64, 150, 300))
        cancelled = rng.random() < _CANCELLED_SHARE
        return Asked(
            number=0,
            prompt_ids=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=rng.getrandbits(63),
            front=rng.choice(list(Front)),
            conversation=name,
            cancel_after=rng.randint(0, max_tokens) if cancelled else None,
        )

    async def _repeat(self, rng: random.Random) -> None:
        """The request is repeated as another tenant, to whom nothing is cached, without a conversation, which
        would lead it home."""
        first = self._again.popleft().asked
        front = rng.choice(list(Front))
        again = replace(first, front=front, conversation="", tenant="again", again=first.number)
        await self._ask(again)

    async def _ask(self, asked: Asked) -> Answer:
        self._count += 1
        answer = await self.clients.ask(replace(asked, number=self._count))
        self.answers.append(answer)
        first = answer.asked.again is None
        if first and answer.ended is Ended.FINISHED and not answer.asked.greedy:
            self._again.append(answer)
        return answer
