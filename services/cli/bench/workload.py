"""A workload is a pure function of its settings and the seed; it is generated while it is sent, in one of two
loops.

A session is a conversation of one or more turns; each turn adds tokens to the conversation, and requests an
answer of a given length.

closed loop   runs a fixed number of sessions at a time, and starts the next one when one ends
open loop     starts each session at its time, whatever still runs; `concurrency` limits how many run
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from services.cli.bench.meter import Meter
from services.cli.bench.sides import Counts, LoadRequest, LoadTarget
from services.values.errors import ConfigError, IsthmusError, PeerFailed

TokenIds = list[int]


@dataclass(frozen=True, slots=True)
class LoadTurn:
    token_ids: TokenIds
    output_len: int


@dataclass(frozen=True, slots=True)
class LoadSession:
    name: str
    turns: Sequence[LoadTurn]
    at_s: float | None = None  # It starts this many seconds after the beginning, if the workload says so.


@dataclass(frozen=True, slots=True)
class Chance:
    """A draw depends on the seed and on the numbers in `what`, and not on the order of draws."""

    seed: int
    vocab_size: int

    def ids(self, length: int, *what: int) -> TokenIds:
        drawn: TokenIds = self._of(what).integers(0, self.vocab_size, length).tolist()
        return drawn

    def length(self, most: int, range_ratio: float, *what: int) -> int:
        least = max(1, int(most * range_ratio))
        return int(self._of(what).integers(least, most + 1))

    def order(self, count: int, *what: int) -> TokenIds:
        drawn: TokenIds = self._of(what).permutation(count).tolist()
        return drawn

    def pauses_s(self, rate: float, *what: int) -> Iterator[float]:
        rng = self._of(what)
        while True:
            yield float(rng.exponential(1.0 / rate))

    def _of(self, what: Sequence[int]) -> np.random.Generator:
        return np.random.default_rng((self.seed, *what))


# The first number of `what` is one of these.
_SYSTEM, _QUESTION, _LENGTHS, _ORDER, _ARRIVALS, _BLOCK, _TAIL, WARM_UP = range(8)


def conversations(
    chance: Chance, count: int, num_turns: int, input_len: int, output_len: int, range_ratio: float = 1.0
) -> Iterator[LoadSession]:
    for number in range(count):
        turns = []
        for turn in range(num_turns):
            length = chance.length(input_len, range_ratio, _LENGTHS, number, turn, 0)
            answer = chance.length(output_len, range_ratio, _LENGTHS, number, turn, 1)
            turns.append(LoadTurn(chance.ids(length, _QUESTION, number, turn), answer))
        yield LoadSession(str(number), turns)


def shared_prefixes(
    chance: Chance,
    num_groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    question_len: int,
    output_len: int,
    range_ratio: float = 1.0,
) -> Iterator[LoadSession]:
    """Generate SGLang's workload generated-shared-prefix: the prompts of a group begin with the same system
    prompt, and all are shuffled."""
    for number in chance.order(num_groups * prompts_per_group, _ORDER):
        group = number // prompts_per_group
        system = chance.length(system_prompt_len, range_ratio, _LENGTHS, group, 0, 0)
        question = chance.length(question_len, range_ratio, _LENGTHS, number, 0, 1)
        answer = chance.length(output_len, range_ratio, _LENGTHS, number, 0, 2)
        ids = chance.ids(system, _SYSTEM, group) + chance.ids(question, _QUESTION, number)
        yield LoadSession(str(number), [LoadTurn(ids, answer)])


@dataclass(frozen=True, slots=True)
class Traced:
    """This is a line of a trace: milliseconds from its beginning, lengths in tokens, and an id for each block
    of the prompt.

    Equal ids stand for equal blocks.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


_TRACE_BLOCK = 512  # An id stands for this many tokens in Mooncake's traces.


def replayed(chance: Chance, lines: Iterable[Traced], slowdown: float, scale: float) -> Iterator[LoadSession]:
    block, first_ms = max(1, round(_TRACE_BLOCK * scale)), None
    for number, line in enumerate(lines):
        first_ms = line.timestamp if first_ms is None else first_ms
        length = max(1, round(line.input_length * scale))
        ids = [token for name in line.hash_ids for token in chance.ids(block, _BLOCK, name)][:length]
        ids += chance.ids(length - len(ids), _TAIL, number)
        output_len = max(1, round(line.output_length * scale))
        yield LoadSession(
            str(number), [LoadTurn(ids, output_len)], (line.timestamp - first_ms) / 1e3 * slowdown
        )


def arriving(chance: Chance, sessions: Iterable[LoadSession], rate: float) -> Iterator[LoadSession]:
    at_s, pauses_s = 0.0, chance.pauses_s(rate, _ARRIVALS)
    for session in sessions:
        yield LoadSession(session.name, session.turns, at_s)
        at_s += next(pauses_s)


def warm_up(chance: Chance, count: int, input_len: int, output_len: int) -> Iterator[LoadSession]:
    for number in range(count):
        yield LoadSession(f"warm-up-{number}", [LoadTurn(chance.ids(input_len, WARM_UP, number), output_len)])


_TRACE_FIELDS = ("timestamp", "input_length", "output_length")


def read_trace(path: Path, most: int | None) -> Iterator[Traced]:
    """Yield at most `most` lines of a trace in the format of Mooncake's: JSON objects with timestamp,
    input_length, output_length and hash_ids.

    Raises ConfigError that names an invalid line, or one that is out of order.
    """
    last_ms = float("-inf")
    for number, text in enumerate(islice(_trace_lines(path), most), start=1):
        line = _trace_line(text, f"{path}, line {number}")
        if line.timestamp < last_ms:
            raise ConfigError(f"{path}, line {number}: its timestamp is before that of the line before")
        last_ms = line.timestamp
        yield line


def count_lines(path: Path, most: int | None) -> int:
    return sum(1 for _ in islice(_trace_lines(path), most))


def _trace_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {error}") from error


def _trace_line(text: str, where: str) -> Traced:
    try:
        given = json.loads(text)
        timestamp, input_length, output_length = (given[name] for name in _TRACE_FIELDS)
        line = Traced(float(timestamp), int(input_length), int(output_length), given.get("hash_ids", ()))
        if min(line.input_length, line.output_length) < 1 or any(name < 0 for name in line.hash_ids):
            raise ValueError("lengths are 1 or more, hash_ids 0 or more")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected {', '.join(_TRACE_FIELDS)} and hash_ids: {error!r}") from error
    return line


Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


async def closed_loop(
    side: LoadTarget, sessions: Iterator[LoadSession], concurrency: int, meter: Meter
) -> None:
    async def one_at_a_time() -> None:
        for session in sessions:
            await converse(side, session, meter)

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(one_at_a_time())


async def open_loop(
    side: LoadTarget,
    sessions: Iterator[LoadSession],
    concurrency: int | None,
    meter: Meter,
    clock: Clock,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Start each session at its `at_s`. A late session does not delay those after it."""
    began_s, room = clock(), asyncio.Semaphore(concurrency or sys.maxsize)

    async def run_one(session: LoadSession) -> None:
        try:
            await converse(side, session, meter)
        finally:
            room.release()

    async with asyncio.TaskGroup() as clients:
        for session in sessions:
            assert session.at_s is not None, "a workload of an open loop says when"
            await sleep(max(0.0, began_s + session.at_s - clock()))
            await room.acquire()
            clients.create_task(run_one(session))


async def converse(side: LoadTarget, session: LoadSession, meter: Meter) -> None:
    so_far: list[int] = []
    conversation = session.name if len(session.turns) > 1 else ""
    for number, turn in enumerate(session.turns, start=1):
        so_far += turn.token_ids
        answer = await _ask(side, LoadRequest(so_far, turn.output_len, conversation), meter)
        if answer is None:
            return
        if not answer and number < len(session.turns):
            raise PeerFailed("the server tells no token ids: conversations want return_token_ids there")
        so_far += answer


async def _ask(side: LoadTarget, load_request: LoadRequest, meter: Meter) -> list[int] | None:
    request, answer, counts = meter.begin(), list[int](), Counts()
    try:
        async with aclosing(side.ask(load_request)) as coming:  # type: ignore[type-var]
            async for arrival in coming:
                meter.note(request, arrival)
                answer += arrival.token_ids
                counts = arrival.counts or counts
        meter.end(request, counts)
    except (IsthmusError, TimeoutError) as error:
        meter.fail(error)
        return None
    except asyncio.CancelledError:
        meter.cut()
        raise
    return answer
