"""These workloads are made up, from a seed, after what has been published of real ones.

    agents     Coding agents. llm-d measured on Weka's coding traces (llm-d-router#2540, 2026-08-25) and gives
               contexts of 37,000 tokens in the median, new parts of 2,000, 3 to 42 turns, and 48 to 50 % of
               the turns with a long context and a short new part. Each session begins with the system prompt
               and tools of one of six products. A tool answers in seconds, a person in half a minute. Some
               turns start sub-agents, which share a system prompt and tools of their own, and whose parent
               waits for them. The answer becomes part of the next prompt.
    documents  Questions about few documents, as in llm-d's benchmark of such: 48,000 tokens each, many
               sessions, of which some documents get more than others.
    giant      One prefix of 32,000 tokens that every prompt begins with, and little else.
    burst      Agents, among which five times a crowd of new sessions of one product comes within two seconds.
    mixed      Chat prompts of a few hundred tokens beside requests whose contexts are 30,000 to 100,000.
    slow       Agents, on a fleet whose first computing rank has a third of the others' speed (cells.py).

"Long" is a context of 24,000 tokens or more, "short" a new part below 4,000. The new part is what a prompt
adds to the last prompt of its session and its answer, or to the prefix that sessions share.

Sessions are the same whatever the load. Open arrivals are a Poisson process of sessions; of closed ones each
user begins the next session when the last one is over.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import log
from random import Random

from services.router.replay.workload import BLOCK_TOKENS, TraceRequest

LONG_TOKENS, SHORT_TOKENS = 24_000, 4_000
_MOST_TOKENS = 128_000  # of a context
_CLIENTS = 16
_BETWEEN_SESSIONS_S = 5.0  # of a closed user


@dataclass(slots=True)
class Turn:
    """It is sent `wait_s` after the last turn and the sub-agents that this one started are over."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    new_tokens: int
    answered: tuple[int, ...]
    wait_s: float
    children: "list[Session]" = field(default_factory=list)


@dataclass(slots=True)
class Session:
    turns: list[Turn]
    burst: int | None = None  # It comes with the others of that crowd.

    @property
    def num_requests(self) -> int:
        return sum(1 + sum(child.num_requests for child in turn.children) for turn in self.turns)


class _Context:
    """A session has said this so far, as blocks; those of a shared prefix are given."""

    def __init__(self, ids: Iterator[int], shared: Sequence[int]) -> None:
        self._ids = ids
        self._blocks = list(shared)
        self.tokens = len(self._blocks) * BLOCK_TOKENS

    def add(self, tokens: int) -> tuple[int, ...]:
        """Return the full blocks, so many tokens later."""
        self.tokens += tokens
        while len(self._blocks) < self.tokens // BLOCK_TOKENS:
            self._blocks.append(next(self._ids))
        return tuple(self._blocks)

    def turn(self, new_tokens: int, output_tokens: int, wait_s: float) -> Turn:
        blocks, prompt_tokens = self.add(new_tokens), self.tokens
        # The newest token's KV was never computed.
        answered = self.add(output_tokens)[: (prompt_tokens + output_tokens - 1) // BLOCK_TOKENS]
        return Turn(blocks, prompt_tokens, output_tokens, new_tokens, answered, wait_s)


class _Maker:
    """Random numbers, block ids and shared prefixes of one workload."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.ids = count()

    def shared(self, tokens: int) -> list[int]:
        return [next(self.ids) for _ in range(tokens // BLOCK_TOKENS)]

    def around(self, median: float, spread: float, least: float, most: float) -> float:
        """Return a number whose logarithm is normal, within bounds."""
        return min(most, max(least, self.random.lognormvariate(log(median), spread)))

    def tokens(self, median: float, spread: float, least: int, most: int) -> int:
        return int(self.around(median, spread, least, most))

    def popular(self, shared: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return one of them; the first ones are asked for more often."""
        return self.random.choices(shared, [1 / (rank + 1) for rank in range(len(shared))])[0]


class _Agents(_Maker):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.products = [self.shared(tokens) for tokens in (14_336, 10_240, 18_432, 8_192, 12_288, 6_144)]
        self.helpers = [self.shared(tokens) for tokens in (6_144, 4_096, 8_192)]

    def session(self, product: Sequence[int] | None = None) -> Session:
        context = _Context(self.ids, self.popular(self.products) if product is None else product)
        num_turns = self.tokens(11, 0.75, 3, 42)
        turns = [context.turn(self.tokens(8_000, 0.9, 500, 60_000), self._output(), 0.0)]
        while len(turns) < num_turns and context.tokens < _MOST_TOKENS:
            turn = context.turn(self.tokens(1_850, 1.1, 60, 40_000), self._output(), self._wait_s())
            if self.random.random() < 0.02:
                turn.children = [self._child() for _ in range(self.random.randint(2, 4))]
            turns.append(turn)
        return Session(turns)

    def _child(self) -> Session:
        context = _Context(self.ids, self.popular(self.helpers))
        turns = [context.turn(self.tokens(2_000, 0.7, 200, 20_000), self._output(), 0.0)]
        for _ in range(self.random.randint(2, 7)):
            turns.append(context.turn(self.tokens(2_000, 1.0, 60, 20_000), self._output(), self._tool_s()))
        return Session(turns)

    def _output(self) -> int:
        return self.tokens(180, 0.9, 20, 2_500)

    def _tool_s(self) -> float:
        return self.around(2.0, 1.0, 0.1, 60.0)

    def _wait_s(self) -> float:
        return self.around(25.0, 0.8, 3.0, 180.0) if self.random.random() < 0.15 else self._tool_s()


def _agents(seed: int, num_requests: int) -> list[Session]:
    return _some(_Agents(seed).session, num_requests)


def _burst(seed: int, num_requests: int) -> list[Session]:
    """Two fifths of the sessions come in five crowds."""
    agents = _Agents(seed)
    sessions = _some(agents.session, num_requests)
    crowd, gap = max(1, 2 * len(sessions) // 25), len(sessions) // 5
    for burst in range(5):
        first = burst * gap + gap // 2
        product = agents.random.choice(agents.products)
        for index in range(first, min(first + crowd, len(sessions))):
            sessions[index] = agents.session(product)
            sessions[index].burst = burst
    return sessions


def _documents(seed: int, num_requests: int) -> list[Session]:
    maker = _Maker(seed)
    documents = [maker.shared(48_128) for _ in range(24)]

    def session() -> Session:
        context = _Context(maker.ids, maker.popular(documents))
        turns = [context.turn(maker.tokens(150, 0.7, 20, 1_000), maker.tokens(150, 0.6, 20, 800), 0.0)]
        for _ in range(maker.random.randint(0, 4)):
            question, answer = maker.tokens(100, 0.7, 20, 1_000), maker.tokens(150, 0.6, 20, 800)
            turns.append(context.turn(question, answer, maker.around(15.0, 0.7, 2.0, 120.0)))
        return Session(turns)

    return _some(session, num_requests)


def _giant(seed: int, num_requests: int) -> list[Session]:
    maker = _Maker(seed)
    prefix = maker.shared(32_256)

    def session() -> Session:
        context = _Context(maker.ids, prefix)
        turns = []
        for turn in range(maker.random.randint(1, 3)):
            wait_s = maker.around(10.0, 0.8, 1.0, 90.0) if turn else 0.0
            turns.append(
                context.turn(maker.tokens(2_500, 0.9, 100, 16_000), maker.tokens(150, 0.7, 20, 800), wait_s)
            )
        return Session(turns)

    return _some(session, num_requests)


def _mixed(seed: int, num_requests: int) -> list[Session]:
    maker = _Maker(seed)
    chat, work = [maker.shared(512)], [maker.shared(8_192) for _ in range(3)]

    def session() -> Session:
        is_long = maker.random.random() < 0.15
        context = _Context(maker.ids, maker.popular(work if is_long else chat))
        turns = []
        for turn in range(maker.random.randint(1, 6)):
            wait_s = maker.around(12.0, 0.8, 1.0, 120.0) if turn else 0.0
            if is_long:
                new_tokens = (
                    maker.tokens(40_000, 0.4, 20_000, 90_000)
                    if not turn
                    else maker.tokens(3_000, 1.0, 100, 20_000)
                )
            else:
                new_tokens = maker.tokens(300, 0.6, 30, 900)
            turns.append(context.turn(new_tokens, maker.tokens(200, 0.7, 20, 1_000), wait_s))
        return Session(turns)

    return _some(session, num_requests)


def _some(session: Callable[[], Session], num_requests: int) -> list[Session]:
    sessions: list[Session] = []
    while num_requests > 0:
        sessions.append(session())
        num_requests -= sessions[-1].num_requests
    return sessions


WORKLOADS: dict[str, Callable[[int, int], list[Session]]] = {
    "agents": _agents,
    "documents": _documents,
    "giant": _giant,
    "burst": _burst,
    "mixed": _mixed,
    "slow": _agents,
}


class _Numbered:
    """Requests of sessions, numbered in the order in which they were taken."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []

    def take(self, session: Session, name: str, client: int, first: TraceRequest) -> tuple[int, ...]:
        """Append the session's requests, the first one to be sent as `first` is. Return those at its end."""
        after, wait_s, arrival_s = first.after, first.wait_s, first.arrival_s
        for turn in session.turns:
            if self.requests and turn is not session.turns[0]:
                wait_s, arrival_s = turn.wait_s, 0.0
            number = len(self.requests)
            self.requests.append(
                TraceRequest(
                    number,
                    arrival_s,
                    turn.blocks,
                    turn.prompt_tokens,
                    turn.output_tokens,
                    name,
                    after,
                    wait_s,
                    turn.answered,
                    turn.new_tokens,
                    client,
                )
            )
            waited, begun = [number], replace(_NOW, after=(number,))
            for index, child in enumerate(turn.children):
                waited += self.take(child, f"{name}.{number}.{index}", client, begun)
            after = tuple(waited)
        return after


_NOW = TraceRequest(0, 0.0, (), 0, 0, "")


def open_arrivals(sessions: Sequence[Session], sessions_per_s: float, seed: int) -> list[TraceRequest]:
    random, numbered, now = Random(seed), _Numbered(), 0.0
    last: int | None = None
    for index, session in enumerate(sessions):
        if session.burst is None or session.burst != last:
            now += random.expovariate(sessions_per_s)
        last = session.burst
        at_s = now + (random.uniform(0.0, 2.0) if session.burst is not None else 0.0)
        client = random.randrange(_CLIENTS)
        numbered.take(session, f"s{index}", client, replace(_NOW, arrival_s=at_s))
    return numbered.requests


def closed_arrivals(sessions: Sequence[Session], num_users: int, seed: int) -> list[TraceRequest]:
    """Each user takes every so manieth session, the first one at a random moment of the first minute."""
    random, numbered = Random(seed), _Numbered()
    busy: list[tuple[int, ...]] = [()] * num_users
    for index, session in enumerate(sessions):
        user = index % num_users
        begins = replace(_NOW, after=busy[user], wait_s=random.expovariate(1 / _BETWEEN_SESSIONS_S))
        if not busy[user]:
            begins = replace(_NOW, arrival_s=random.uniform(0.0, 60.0))
        busy[user] = numbered.take(session, f"s{index}", user % _CLIENTS, begins)
    return numbered.requests
