"""This module has what a round of the fuzz asks: turns and branches of a tree of conversations, sampled in
every way."""

import random
from dataclasses import dataclass
from typing import Any

from services.values.request import SamplingParams
from services.wire import convert_request
from services.wire.isthmus.v1 import common_pb2, generation_pb2

VOCAB_SIZE = 512
_MAX_NODES = 12


@dataclass(frozen=True)
class Asked:
    """`leave_after`: tokens after which the client leaves; `leave_s`: seconds."""

    prompt_ids: tuple[int, ...]
    request: generation_pb2.GenerateRequest
    leave_after: int | None = None
    leave_s: float | None = None

    @property
    def sampling(self) -> SamplingParams:
        """As the ranks see it: float32 on the wire."""
        return convert_request.sampling_from_proto(self.request.sampling)

    def __str__(self) -> str:
        sampling = " ".join(str(self.request.sampling).split())[:300]  # there may be 200 stop tokens
        return f"a prompt of {len(self.prompt_ids)} with {sampling}"


class Tree:
    """Texts so far, which requests go on from, whole or cut. `context` bounds prompt and answer."""

    def __init__(self, chance: random.Random, context: int) -> None:
        self._chance, self._context = chance, context
        self._nodes = [self._ids(chance.randint(1, 80)) for _ in range(3)]

    def draw(self) -> Asked:
        chance = self._chance
        prompt_ids = self._prompt()
        return Asked(
            prompt_ids,
            generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=prompt_ids),
                sampling=common_pb2.SamplingParams(**_draw_sampling(chance)),
                conversation_id=chance.choice(["", f"c{chance.randrange(5)}"]),
                priority=chance.choice([0, 0, -1]),
                tenant=chance.choice(["", "", "t"]),
            ),
            leave_after=chance.choice([None, None, None, None, 0, 1, 3]),
            leave_s=chance.choice([0, 0.002, 0.02, 0.2]) if chance.random() < 0.08 else None,
        )

    def grow(self, prompt_ids: tuple[int, ...], token_ids: list[int]) -> None:
        if len(prompt_ids) + len(token_ids) >= self._context - 20:
            return
        self._nodes.append((*prompt_ids, *token_ids))
        if len(self._nodes) > _MAX_NODES:
            self._nodes.pop(self._chance.randrange(len(self._nodes)))

    def _prompt(self) -> tuple[int, ...]:
        chance = self._chance
        if chance.random() < 0.05:
            return self._ids(self._context - 1)  # the longest there may be
        node = chance.choice(self._nodes)
        cut = chance.choice([len(node), len(node), len(node), chance.randint(1, len(node))])
        return (*node[:cut], *self._ids(chance.choice([0, 0, 1, 3, 17, 64])))[: self._context - 1]

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(4, VOCAB_SIZE) for _ in range(min(length, self._context - 1)))


def _draw_sampling(chance: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "max_tokens": chance.choice([1, 2, 3, 8, 20, 30, 40, 60, 90]),
        "ignore_eos": chance.random() < 0.7,
        "temperature": 0.0,
    }
    if chance.random() < 0.05:
        del drawn["max_tokens"]
    if chance.random() < 0.5:
        drawn |= _draw_distribution(chance)
    drawn |= _some(
        chance,
        repetition_penalty=(0.2, [0.5, 1.3, 5.0]),
        frequency_penalty=(0.2, [-1.0, 0.5, 2.0]),
        presence_penalty=(0.2, [-1.0, 0.5, 2.0]),
        logprobs=(0.3, [0, 1, 5, 20]),
    )
    if chance.random() < 0.2:
        drawn["stop_token_ids"] = [chance.randrange(VOCAB_SIZE) for _ in range(chance.choice([1, 50, 200]))]
    if chance.random() < 0.2 and "max_tokens" in drawn:
        drawn["min_tokens"] = chance.randint(0, drawn["max_tokens"])
    return drawn


def _draw_distribution(chance: random.Random) -> dict[str, Any]:
    return {
        "temperature": chance.choice([0.3, 1.0, 3.0, 50.0]),
        "seed": chance.choice([0, 1, 2**64 - 1, chance.randrange(2**64)]),
    } | _some(
        chance,
        top_k=(0.4, [1, 2, 5, 64, 100, 600]),
        top_p=(0.4, [0.01, 0.5, 0.95]),
        min_p=(0.3, [0.01, 0.3, 1.0]),
    )


def _some(chance: random.Random, **choices: tuple[float, list[Any]]) -> dict[str, Any]:
    """Each with its chance, and one of its values."""
    return {
        name: chance.choice(values) for name, (share, values) in choices.items() if chance.random() < share
    }
