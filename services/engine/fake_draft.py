"""A fake runner with a draft model, which is right in a share of positions and has KV of its own.

The draft's slot of position i holds mix(token_i, i), in a pool with the target's page ids. It foresees what
the target chooses, and says so in a share of positions; but only if the sum of its own slots is that of the
ids so far. So where its KV is missing, stale or another's it says something else, and fewer drafts come true.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.fake import FakeRunner, draw, first_seen, mix, mixed
from services.engine.paged.model_runner import Chunk, Sampled, TailPages
from services.kv.shadow_validity import ShadowValidity
from services.values.errors import ConfigError
from services.values.kv import DraftKv, GroupKind, KvGroup, PageId, PoolMemory

_SLOT_BYTES = 8
_FINGERPRINT = 0xD4AF
_SALT = 0x5EED  # It keeps agreement independent of what comes.
_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class FakeDraftSettings:
    agrees: float  # It agrees in this share of positions.
    step_s: float = 0.0  # One draft for each sequence of a batch takes so long.
    # It computes chunks of one token, too, as on a prefill rank, where nobody decodes.
    every_chunk: bool = False
    catch_up_tokens: int = 512  # It computes so many at most beside prompt chunks, before a step's drafts.


def parse_draft(text: str, *, every_chunk: bool = False, catch_up_tokens: int = 512) -> FakeDraftSettings:
    """Read "agree:0.8", or "agree:0.8:0.001" where a draft takes so many seconds. Raises ConfigError."""
    name, *numbers = text.split(":")
    try:
        agrees, step_s = map(float, (*numbers, "0")[:2])
        if name == "agree" and len(numbers) in (1, 2) and 0 <= agrees <= 1 and step_s >= 0:
            return FakeDraftSettings(agrees, step_s, every_chunk, catch_up_tokens)
    except ValueError:
        pass
    raise ConfigError(f"--fake-draft takes agree:SHARE or agree:SHARE:SECONDS, not {text!r}")


class FakeDraft:
    """It implements DraftModel."""

    def __init__(
        self, target: FakeRunner, settings: FakeDraftSettings, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._target = target
        self._settings = settings
        self._sleep = sleep
        self.slots = np.zeros_like(target.slots)
        self.validity = ShadowValidity(*self.slots.shape)
        self.memory = PoolMemory(self.slots.ctypes.data, len(self.slots))
        self.computed_tokens = 0  # These are beside drafts.

    @property
    def kv(self) -> DraftKv:
        unit_bytes = self.slots.shape[1] * _SLOT_BYTES
        group = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 1, "uint64", unit_bytes=unit_bytes)
        return DraftKv(_FINGERPRINT, group)

    @property
    def step_s(self) -> float:
        return self._settings.step_s

    def lent(self, pages: Sequence[PageId]) -> None:
        self.validity.lent(pages)

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        self.validity.received(pages, num_tokens)

    def held_tokens(self, pages: Sequence[PageId]) -> int:
        return self.validity.valid_len(pages)

    def compute_with(self, chunk: Chunk) -> None:
        decodes = len(chunk.token_ids) == 1 + chunk.num_drafts
        if not decodes or self._settings.every_chunk:
            lacking = self.validity.lacking(chunk.pages, chunk.start, chunk.end)
            self._compute(chunk.pages, lacking, chunk.token_ids[lacking.start - chunk.start :])

    def propose(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> list[tuple[int, ...]]:
        sequences = [(chunk.pages, chunk.history) for chunk in chunks]
        due = self.validity.to_compute(sequences, self._settings.catch_up_tokens)
        drafts = []
        for chunk, positions, count in zip(chunks, due, counts, strict=True):
            self._compute(chunk.pages, positions, chunk.history[positions.start : positions.stop])
            drafts.append(self._draft(chunk, count) if positions.stop == chunk.end else ())
        self._sleep(self.step_s * max(map(len, drafts), default=0))
        return drafts

    def _compute(self, pages: Sequence[PageId], positions: range, ids: Sequence[int]) -> None:
        if positions:
            self._store(pages, positions.start, ids)
            self.validity.computed(pages, positions.start, positions.stop)
            self.computed_tokens += len(positions)

    def _store(self, pages: Sequence[PageId], start: int, ids: Sequence[int]) -> None:
        page_size = self.slots.shape[1]
        for position, token in enumerate(ids, start):
            self.slots[pages[position // page_size], position % page_size] = mix(token, position)

    def _draft(self, chunk: Chunk, count: int) -> tuple[int, ...]:
        foresight, has_kv, drafts = _Foresight(self._target, chunk), self._has_kv(chunk), list[int]()
        for _ in range(count):
            token = foresight.next_token
            if not has_kv or foresight.chance >= self._settings.agrees:
                token = (token + 1) % self._target.vocab_size
            drafts.append(token)
            foresight.take(token)
        room = len(chunk.pages) * self.slots.shape[1] - chunk.end
        self._store(chunk.pages, chunk.end, drafts[:-1][:room])
        self.validity.foreseen(chunk.pages, chunk.end, drafts[:-1])
        return tuple(drafts)

    def _has_kv(self, chunk: Chunk) -> bool:
        own = self.slots[list(chunk.pages)].reshape(-1)[: chunk.end]
        return bool(
            own.sum(dtype=np.uint64) == mixed(chunk.history, range(len(chunk.history))).sum(dtype=np.uint64)
        )


class FakeDraftingRunner(FakeRunner):
    def __init__(self, draft: FakeDraftSettings, **settings: Any) -> None:
        super().__init__(**settings)
        self.draft: FakeDraft = FakeDraft(self, draft, self._sleep)
        self.layout = replace(self.layout, draft=self.draft.kv)

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        sampled = super().run(chunks)
        for chunk in chunks:
            self.draft.compute_with(chunk)
        return sampled

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        if group < len(self.layout.groups):
            return super().read_pages(pages, group)
        return (memoryview(self.draft.slots[page]).cast("B") for page in pages)


class _Foresight:
    def __init__(self, target: FakeRunner, chunk: Chunk) -> None:
        self._target = target
        self._chunk = chunk
        self._position = chunk.start
        self._total = int(target.slots[list(chunk.pages)].reshape(-1)[: chunk.start].sum(dtype=np.uint64))
        # It has values by group and position.
        self._taken: list[dict[int, int]] = [{} for _ in target.layout.carried]
        self.take(chunk.token_ids[0])

    @property
    def next_token(self) -> int:
        return draw(self._total % _RANGE, self._position, self._target.vocab_size)

    @property
    def chance(self) -> float:
        return mix((self._total ^ _SALT) % _RANGE, self._position) / _RANGE

    def take(self, token: int) -> None:
        position, page_size = self._position, self._target.layout.page_size
        value, tails = mix(token, position), iter(self._chunk.tails)
        groups = zip(self._target.layout.carried, self._target.carried_pools, self._taken, strict=True)
        for group, pool, taken in groups:
            if group.kind is GroupKind.RECURRENT:
                value = mix(value ^ self._state(pool, taken), position)
            else:
                value += _seen(
                    pool, taken, next(tails), range(first_seen(group, position), position), page_size
                )
                value = mix(value % _RANGE, position)
            taken[position] = value
        self._total += value
        self._position += 1

    def _state(self, pool: NDArray[np.uint64], taken: Mapping[int, int]) -> int:
        if taken:
            return taken[self._position - 1]
        assert self._chunk.slot is not None
        return int(pool[self._chunk.slot, -1]) if self._position else 0


def _seen(
    pool: NDArray[np.uint64], taken: Mapping[int, int], tail: TailPages, positions: range, page_size: int
) -> int:
    def value(position: int) -> int:
        if position in taken:
            return taken[position]
        return int(pool[tail.pages[position // page_size - tail.first_page], position % page_size])

    return sum(map(value, positions))
