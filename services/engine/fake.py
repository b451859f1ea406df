"""A model runner that is exact and tiny: the next token is a pure function of all tokens so far.

It has a real pool. The slot of position i holds mix(token_i, i), and the next token is drawn from the
sum of all slots, read back from the pages. So one wrong, missing or stale page anywhere changes the
output, and `continuation` says what it should have been.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.engine.paged.runner import Chunk, Sampled
from services.values.errors import ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout, PageId, PoolMemory
from services.values.request import TokenLogprobs

_SLOT_BYTES = 8
_MASK = 2**64 - 1
VOCAB_SIZE = 512
FINGERPRINT = 0xFA4E


@dataclass(frozen=True, slots=True)
class FakeSpeed:
    """How long computing takes, so that tests can act in the middle of it."""

    step_s: float = 0.0
    prompt_token_s: float = 0.0


class FakeRunner:
    """Implements ModelRunner."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_context_tokens: int = 4096,
        vocab_size: int = VOCAB_SIZE,
        speed: FakeSpeed = FakeSpeed(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.slots = np.zeros((num_pages, page_size), dtype=np.uint64)  # what each token left
        self._speed = speed
        self._sleep = sleep
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        group = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 1, "uint64")
        self.layout = KvLayout(page_size, page_size * _SLOT_BYTES, FINGERPRINT, groups=(group,))
        self.memory = PoolMemory(self.slots.ctypes.data, num_pages)
        self.carried_memory: tuple[PoolMemory, ...] = ()

    def run(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        prompt_tokens = sum(len(c.token_ids) for c in chunks if len(c.token_ids) > 1)
        pause_s = self._speed.step_s + self._speed.prompt_token_s * prompt_tokens
        if pause_s > 0:
            self._sleep(pause_s)
        return [self._run_chunk(chunk) for chunk in chunks]

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        raise ProtocolError(f"{self.layout} has no recurrent state")

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        if group:
            raise ProtocolError(f"{self.layout} has no group {group}")
        return (memoryview(self.slots[page]).cast("B") for page in pages)

    def close(self) -> None:
        self.slots = np.zeros((0, 0), dtype=np.uint64)

    def _run_chunk(self, chunk: Chunk) -> Sampled | None:
        page_size = self.layout.page_size
        for position, token in enumerate(chunk.token_ids, start=chunk.start):
            self.slots[chunk.pages[position // page_size], position % page_size] = _mix(token, position)
        if not chunk.sample:
            return None
        slots = self.slots[list(chunk.pages)].reshape(-1)[: chunk.end]
        token = _draw(int(slots.sum(dtype=np.uint64)), chunk.end, self.vocab_size)
        wanted = chunk.sampling.logprobs is not None
        return Sampled(token, TokenLogprobs(token, 0.0) if wanted else None)


def continuation(ids: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that a FakeRunner must generate after `ids`."""
    total = sum(_mix(token, position) for position, token in enumerate(ids))
    tokens: list[int] = []
    for length in range(len(ids), len(ids) + num_tokens):
        tokens.append(_draw(total & _MASK, length, VOCAB_SIZE))
        total += _mix(tokens[-1], length)
    return tokens


def _mix(token: int, position: int) -> int:
    """splitmix64's finalizer over the pair (Steele, Lea, Flood 2014)."""
    x = (token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _draw(total: int, length: int, vocab_size: int) -> int:
    return _mix(total, length) % vocab_size
