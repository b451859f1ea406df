"""A model runner that is exact and tiny: the next token is a pure function of all tokens so far.

It has a real pool. The slot of position i holds mix(token_i, i), and the next token is drawn from the
sum of all slots, read back from the pages. So one wrong, missing or stale page anywhere changes the
output, and `continuation` says what it should have been. The same holds for log-probabilities of a
prompt's tokens (`scores`): the next one is certain, and each of the others less.

With carried groups each token is mixed with what its windows hold and with the state, as of the tokens
before it, and it is that which is stored: so whatever was wrong once stays wrong. It has real pools of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.engine.paged.model_runner import (
    NO_TOKEN,
    Chunk,
    DraftModel,
    Sampled,
    Scoring,
    keep_accepted,
    masks_asked,
)
from services.engine.start_fault import reading
from services.engine.torch.draft_tokens import single_tokens
from services.grammar.matcher import MaskCounts, MaskMaker, Masks
from services.model.lora import CONFIG, WEIGHTS
from services.values.adapter import Adapter
from services.values.errors import ConfigError
from services.values.kv import GroupKind, KvGroup, KvLayout, PageId, PoolMemory
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import TokenLogprobs

_SLOT_BYTES = 8
_WINDOWS = {"window": GroupKind.SLIDING_WINDOW, "chunk": GroupKind.CHUNKED_WINDOW}
_FULL = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 1, "uint64")
_MASK = 2**64 - 1
_DRAWN_LOGIT = 10.0
VOCAB_SIZE = 512
_NO_MASKS = Masks(np.zeros((0, 0), np.int32), 0)
Biases = Sequence[tuple[int, float]]
FINGERPRINT = 0xFA4E


@dataclass(frozen=True, slots=True)
class FakeSpeed:
    step_s: float = 0.0
    prompt_token_s: float = 0.0


class FakeRunner:
    """It implements ModelRunner."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_context_tokens: int = 16_384,
        vocab_size: int = VOCAB_SIZE,
        carried: Sequence[KvGroup] = (),
        carried_units: Sequence[int] = (),
        max_step_drafts: int = 1024,
        lora: Mapping[str, Path] | None = None,
        speed: FakeSpeed = FakeSpeed(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`carried` are as `fake_window` and `fake_state` make them, with so many units of each in its
        pool."""
        self.slots = np.zeros((num_pages, page_size), dtype=np.uint64)
        self.carried_pools = [
            np.zeros((units, _unit_values(group, page_size)), dtype=np.uint64)
            for group, units in zip(carried, carried_units, strict=True)
        ]
        self._speed = speed
        self._sleep = sleep
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.max_step_drafts = max_step_drafts
        groups = tuple(
            replace(g, unit_bytes=p[0].nbytes) for g, p in zip(carried, self.carried_pools, strict=True)
        )
        self.layout = KvLayout(page_size, page_size * _SLOT_BYTES, FINGERPRINT, groups=(_FULL, *groups))
        self.memory = PoolMemory(self.slots.ctypes.data, num_pages)
        self.carried_memory = tuple(PoolMemory(pool.ctypes.data, len(pool)) for pool in self.carried_pools)
        self.draft: DraftModel | None = None
        self.steps_by_way: Mapping[str, int] = {}
        self.adapters = FakeAdapters()
        for name, directory in (lora or {}).items():
            self.adapters.put(self.adapters.read(name, directory))
        self._mask_maker = MaskMaker(vocab_size)

    @property
    def mask_counts(self) -> MaskCounts:
        return self._mask_maker.counts

    def when_launched(self, call: Callable[[], None]) -> bool:
        return False

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        prompt_tokens = sum(len(c.token_ids) for c in chunks if len(c.token_ids) > 1 + c.num_drafts)
        pause_s = self._speed.step_s + self._speed.prompt_token_s * prompt_tokens
        if pause_s > 0:
            self._sleep(pause_s)
        if self.layout.carried:
            return [self._run_chunk(chunk) for chunk in chunks]
        self._store(chunks)
        return self._chosen(chunks)

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        for pool in self._pools_of(GroupKind.RECURRENT):
            for source, target in moves:
                pool[target] = pool[source]

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        pool = (self.slots, *self.carried_pools)[group]
        return (memoryview(pool[page]).cast("B") for page in pages)

    def staging(self, slot_bytes: int) -> None:
        """Return None: its pools are in the host's memory."""

    def close(self) -> None:
        self.slots = np.zeros((0, 0), dtype=np.uint64)

    def _store(self, chunks: Sequence[Chunk]) -> None:
        page_size, token_ids, positions, places = self.layout.page_size, list[int](), list[int](), list[int]()
        for chunk in chunks:
            pages, first = chunk.pages, max(chunk.start, chunk.store_from)
            token_ids += adapted(chunk.token_ids[first - chunk.start :], chunk.adapter)
            positions += range(first, chunk.end)
            places += [pages[at // page_size] * page_size + at % page_size for at in range(first, chunk.end)]
        self.slots.reshape(-1)[places] = mixed(token_ids, positions)

    def _chosen(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        for chunk in chunks:
            if chunk.scoring is not None:
                self._tell(chunk, chunk.scoring)
        totals = iter(self._totals([chunk for chunk in chunks if chunk.sample]))
        return [self._choices(chunk, next(totals)) if chunk.sample else () for chunk in chunks]

    def _run_chunk(self, chunk: Chunk) -> tuple[Sampled, ...]:
        page_size, states = self.layout.page_size, list[list[int]]()
        for position, token in enumerate(adapted(chunk.token_ids, chunk.adapter), start=chunk.start):
            value = self._carry(chunk, position, mix(token, position))
            if position >= chunk.store_from:
                self.slots[chunk.pages[position // page_size], position % page_size] = value
            states.append([int(pool[chunk.slot, -1]) for pool in self._pools_of(GroupKind.RECURRENT)])
        if chunk.scoring is not None:
            self._tell(chunk, chunk.scoring)
        if not chunk.sample:
            return ()
        kept = self._choices(chunk, self._total(chunk, chunk.end))
        after = states[len(chunk.token_ids) - chunk.num_drafts + len(kept) - 2]
        for pool, state in zip(self._pools_of(GroupKind.RECURRENT), after, strict=True):
            pool[chunk.slot] = state
        return kept

    def _choices(self, chunk: Chunk, total: int) -> tuple[Sampled, ...]:
        masks = self._mask_maker.make(masks_asked([chunk])) if chunk.matcher is not None else _NO_MASKS
        if not chunk.num_drafts:
            return (self._choose(chunk, chunk.end, total, masks),)
        first = chunk.end - chunk.num_drafts
        points = enumerate(single_tokens(chunk))
        choices = [
            self._choose(point, first + row, self._total(point, first + row), masks, row)
            for row, point in points
        ]
        return keep_accepted(chunk.drafts, choices)

    def _totals(self, chunks: Sequence[Chunk]) -> list[int]:
        if not chunks:
            return []
        page_size = self.layout.page_size
        ends = np.array([chunk.end for chunk in chunks])
        counts = -(-ends // page_size)
        pages = list(chain(*(c.pages[:count] for c, count in zip(chunks, counts.tolist(), strict=True))))
        held, last = self.slots.take(pages, axis=0), counts.cumsum() - 1
        held[last] *= np.arange(page_size) < (ends - (counts - 1) * page_size)[:, None]
        return [int(each) for each in np.add.reduceat(held.sum(axis=1), last + 1 - counts)]

    def _total(self, chunk: Chunk, end: int) -> int:
        slots = self.slots[list(chunk.pages)].reshape(-1)[:end]
        return int(slots.sum(dtype=np.uint64))

    def _tell(self, chunk: Chunk, asked: Scoring) -> None:
        following = enumerate(asked.token_ids, start=asked.first)
        told = [
            scores(self._total(chunk, end), end, token, self.vocab_size, asked.num_top)
            for end, token in following
        ]
        asked.tell(PromptLogprobs.joined(told, asked.num_top))

    def _choose(self, chunk: Chunk, end: int, total: int, masks: Masks, row: int = 0) -> Sampled:
        banned, biases = chunk.banned_ids, chunk.sampling.logit_bias
        if len(masks) or banned or biases:
            allowed = masks.expanded()[row].copy() if len(masks) else np.ones(self.vocab_size, bool)
            allowed[list(banned)] = False
            token = choose(total, end, allowed, biases)
        else:
            token = draw(total, end, self.vocab_size)
        wanted = chunk.sampling.logprobs is not None
        return Sampled(token, TokenLogprobs(token, 0.0) if wanted else None)

    def _carry(self, chunk: Chunk, position: int, value: int) -> int:
        page_size, tails = self.layout.page_size, iter(chunk.tails)
        for group, pool in zip(self.layout.carried, self.carried_pools, strict=True):
            if group.kind is GroupKind.RECURRENT:
                assert chunk.slot is not None
                value = mix(value ^ (int(pool[chunk.slot, -1]) if position else 0), position)
                pool[chunk.slot] = value
                continue
            tail, first = next(tails), first_seen(group, position)
            first_page, page = first // page_size, position // page_size
            pages = tail.pages[first_page - tail.first_page : page - tail.first_page + 1]
            seen = pool[list(pages)].reshape(-1)[first % page_size : position - first_page * page_size]
            value = mix((value + int(seen.sum(dtype=np.uint64))) & _MASK, position)
            pool[tail.pages[position // page_size - tail.first_page], position % page_size] = value
        return value

    def _pools_of(self, kind: GroupKind) -> Iterator[NDArray[np.uint64]]:
        groups = zip(self.layout.carried, self.carried_pools, strict=True)
        return (pool for group, pool in groups if group.kind is kind)


def fake_window(window: int, kind: GroupKind = GroupKind.SLIDING_WINDOW) -> KvGroup:
    return KvGroup(kind, (1,), 1, 1, "uint64", window=window, unit_bytes=_SLOT_BYTES)


def parse_carried(text: str) -> tuple[KvGroup, ...]:
    """Read "window:8,chunk:16,state" or "state:500". Raises ConfigError."""
    return tuple(_parse_group(part) for part in text.split(",") if part)


def _parse_group(part: str) -> KvGroup:
    name, _, tokens = part.partition(":")
    if part == "state":
        return fake_state()
    if tokens.isdecimal() and int(tokens):
        if name == "state":
            return fake_state(int(tokens))
        if name in _WINDOWS:
            return fake_window(int(tokens), _WINDOWS[name])
    raise ConfigError(
        f"--fake-carried takes window:TOKENS, chunk:TOKENS, state and state:TOKENS, not {part!r}"
    )


def fake_state(tokens: int = 1) -> KvGroup:
    """Return a recurrent group for a FakeRunner, whose state weighs as much as so many tokens of
    attention."""
    return KvGroup(GroupKind.RECURRENT, (2,), 0, 0, "uint64", unit_bytes=tokens * _SLOT_BYTES)


def _unit_values(group: KvGroup, page_size: int) -> int:
    return page_size if group.kind.is_windowed else group.unit_bytes // _SLOT_BYTES


class FakeModel:
    """It computes what a FakeRunner does, without pages: `values` are stored, by group and position."""

    def __init__(self, ids: Sequence[int] = (), carried: Sequence[KvGroup] = ()) -> None:
        self._carried = carried
        self.values: list[list[int]] = [[] for _ in (_FULL, *carried)]
        self._total = 0
        for token in ids:
            self.take(token)

    @property
    def total(self) -> int:
        return self._total & _MASK

    @property
    def next_token(self) -> int:
        return draw(self.total, len(self.values[0]), VOCAB_SIZE)

    def take(self, token: int) -> None:
        position = len(self.values[0])
        value = mix(token, position)
        for group, values in zip(self._carried, self.values[1:], strict=True):
            if group.kind is GroupKind.RECURRENT:
                value = mix(value ^ (values[-1] if values else 0), position)
            else:
                value = mix((value + sum(values[first_seen(group, position) :])) & _MASK, position)
            values.append(value)
        self.values[0].append(value)
        self._total += value


def continuation(
    ids: Sequence[int], num_tokens: int, carried: Sequence[KvGroup] = (), adapter: Adapter | None = None
) -> list[int]:
    """Return the `num_tokens` tokens that a FakeRunner must generate after `ids`."""
    model = FakeModel(adapted(ids, adapter), carried)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(model.next_token)
        model.take(*adapted(tokens[-1:], adapter))
    return tokens


def adapted(ids: Sequence[int], adapter: Adapter | None) -> Sequence[int]:
    """Return numbers that an adapter stores instead of the ids."""
    if adapter is None:
        return ids
    shift = int(adapter.digest[:8], 16) << 24
    return [token_id + shift for token_id in ids]


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    adapter: Adapter


class FakeAdapters:
    """It implements RunnerAdapters for directories with the files of an adapter, whatever is in these."""

    def __init__(self) -> None:
        self.loaded: set[Adapter] = set()

    def read(self, name: str, directory: Path) -> FakeAdapter:
        digest = blake2b(digest_size=16)
        with reading(f"the adapter {directory}"):
            for file in (CONFIG, WEIGHTS):
                digest.update((directory / file).read_bytes())
        return FakeAdapter(Adapter(name, digest.hexdigest()))

    def put(self, read: FakeAdapter) -> None:
        self.loaded.add(read.adapter)

    def drop(self, adapter: Adapter) -> None:
        self.loaded.remove(adapter)


def first_seen(group: KvGroup, position: int) -> int:
    if group.kind is GroupKind.CHUNKED_WINDOW:
        return position // group.window * group.window
    return max(0, position - group.window + 1)


def mix(token: int, position: int) -> int:
    """It is splitmix64's finalizer over the pair (Steele, Lea, Flood 2014)."""
    x = (token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mixed(token_ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    tokens, at = np.array(token_ids, np.uint64), np.array(positions, np.uint64)
    x = tokens * np.uint64(0x9E3779B97F4A7C15) + at * np.uint64(0xD1B54A32D192ED03) + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def draw(total: int, length: int, vocab_size: int) -> int:
    return mix(total, length) % vocab_size


def choose(total: int, length: int, allowed: NDArray[np.bool], logit_bias: Biases = ()) -> int:
    """Return one of the ids that are allowed, by a draw.

    With biases the drawn one's logit is 10, the others have 0: the highest is chosen, or drawn from several.
    """
    ids = np.flatnonzero(allowed)
    if not len(ids):
        return NO_TOKEN
    drawn = int(ids[draw(total, length, len(ids))])
    if not logit_bias:
        return drawn
    logits = np.where(allowed, 0.0, -np.inf)
    logits[drawn] = _DRAWN_LOGIT
    for token_id, bias in logit_bias:
        logits[token_id] += bias
    highest = np.flatnonzero(logits == logits.max())
    return int(highest[draw(total, length, len(highest))])


def scores(total: int, length: int, token: int, vocab_size: int, num_top: int) -> PromptLogprobs:
    """Score a token after so many. The scores are no distribution, but a float32 holds them as they are."""
    behind = (np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(
        mix(total, length)
    )
    logprobs = -1 - (behind >> np.uint64(40)).astype(np.float64) / 2**20
    logprobs[draw(total, length, vocab_size)] = 0.0
    order = np.argsort(-logprobs, kind="stable")[:num_top]
    rank = 1 + np.count_nonzero(logprobs > logprobs[token])
    top_ids, top = np.zeros(num_top, "<u4"), np.full(num_top, np.nan, "<f4")
    top_ids[: len(order)], top[: len(order)] = order, logprobs[order]
    own = np.array([logprobs[token]], "<f4").tobytes()
    return PromptLogprobs(num_top, own, np.array([rank], "<u4").tobytes(), top_ids.tobytes(), top.tobytes())
