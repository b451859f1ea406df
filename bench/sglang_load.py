"""Conversations that a system is driven with, and what is measured of each turn."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from services.values.errors import PeerFailed, Unavailable

log = logging.getLogger(__name__)

TokenIds = list[int]
_FIRST_ID, _END_ID = 4, 500  # of the characters vocabulary, without its special tokens
_MAX_ATTEMPTS, _RETRY_S = 5, 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """`conversations` of `turns`, at most `concurrency` turns at once, one of a conversation at a time."""

    conversations: int
    turns: int
    concurrency: int
    system_tokens: int  # the same at the start of every conversation
    first_tokens: int  # of the first question
    next_tokens: int  # of each later one
    max_tokens: int  # of each answer
    seed: int

    def ids(self, name: str, count: int) -> TokenIds:
        rng = random.Random(f"{self.seed}/{name}")
        return [rng.randrange(_FIRST_ID, _END_ID) for _ in range(count)]

    def question(self, conversation: int, turn: int) -> TokenIds:
        """Return what a turn adds to the history; the first one begins with what all share."""
        if turn == 0:
            return self.ids("system", self.system_tokens) + self.ids(f"{conversation}", self.first_tokens)
        return self.ids(f"{conversation}/{turn}", self.next_tokens)


@dataclass(slots=True)
class Turn:
    """One turn of a conversation. The last three are known when it has ended."""

    conversation: int
    turn: int
    prompt: TokenIds
    known_tokens: int  # of the prompt, that the rank of the turn before has KV of: all but its last token
    token_ids: TokenIds = field(default_factory=list)
    attempts: int = 0  # more than one: the system had failed the others
    ttft_s: float = 0.0  # since the first attempt was sent
    gaps_s: list[float] = field(default_factory=list)  # between tokens; those that came together share one
    rank: str = ""
    decode_prefix_len: int = 0
    kv_bytes_moved: int = 0

    @property
    def name(self) -> str:
        return f"{self.conversation:04d}-{self.turn:03d}"


# Yields the new ids whenever some come, and fills in the turn's last three fields, then or later.
Client = Callable[[Turn], AsyncIterator[TokenIds]]


async def drive(client: Client, load: Load) -> tuple[list[Turn], float]:
    """All turns, and the seconds they took. Which conversation goes next is drawn."""
    rng = random.Random(load.seed)
    waiting = [_first(load, conversation) for conversation in range(load.conversations)]
    turns: list[Turn] = []

    async def one_at_a_time() -> None:
        while waiting:
            turn = waiting.pop(rng.randrange(len(waiting)))
            await run_turn(client, turn)
            turns.append(turn)
            if turn.turn + 1 < load.turns:
                waiting.append(_next(load, turn))

    began_s = time.perf_counter()
    await asyncio.gather(*(one_at_a_time() for _ in range(load.concurrency)))
    return turns, time.perf_counter() - began_s


def _first(load: Load, conversation: int) -> Turn:
    return Turn(conversation, 0, load.question(conversation, 0), known_tokens=0)


def _next(load: Load, last: Turn) -> Turn:
    history = last.prompt + last.token_ids
    question = load.question(last.conversation, last.turn + 1)
    return Turn(last.conversation, last.turn + 1, history + question, known_tokens=len(history) - 1)


async def run_turn(client: Client, turn: Turn) -> None:
    """Raises what the last attempt failed with."""
    sent_s = time.perf_counter()
    while True:
        turn.attempts += 1
        try:
            await _attempt(client, turn, sent_s)
            return
        except (PeerFailed, Unavailable) as error:
            if turn.attempts == _MAX_ATTEMPTS:
                raise
            log.warning("turn_failed turn=%s attempt=%d error=%r", turn.name, turn.attempts, str(error))
            await asyncio.sleep(_RETRY_S)


async def _attempt(client: Client, turn: Turn, sent_s: float) -> None:
    turn.token_ids, turn.gaps_s = [], []
    last_s = sent_s
    async for ids in client(turn):
        now_s = time.perf_counter()
        if turn.token_ids:
            turn.gaps_s += [(now_s - last_s) / max(1, len(ids))] * len(ids)
        elif ids:
            turn.ttft_s = now_s - sent_s
        turn.token_ids += ids
        last_s = now_s if ids else last_s


def warm_up(load: Load, count: int) -> list[Turn]:
    """Short requests that share nothing with the load: the first ones open connections."""
    return [Turn(9000 + i, 0, load.ids(f"warm-up/{i}", 40), known_tokens=0) for i in range(count)]
