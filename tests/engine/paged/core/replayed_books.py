"""A load of clients is replayed on one rank's books, an engine core whose model computes nothing: decode's
hits beside attention's alone, and what prefill computes with few checkpoints.

What is matched, computed and kept is the core's own doing. A step takes no time, and the same load is the
same order each time, so that two ranks differ by their pools alone.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bench.decode_cache import workload as workloads
from bench.decode_cache.workload import Conversation, Ids, TokenIds, Workload, prompt_of
from bench.hybrid.models import Model
from bench.report import Row
from services.engine.fake import FakeAdapters
from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Reserved, Token
from services.engine.paged.model_runner import Chunk, Sampled
from services.engine.paged.sequence import Sequence as CoreSequence
from services.grammar.matcher import MaskCounts
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.kv.tails import units_at, units_for
from services.values.kv import GroupKind, KvGroup, KvLayout, PageId, PoolMemory
from services.values.rank import Plan, TransferId
from services.values.request import GenerationRequest, SamplingParams

_FULL = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 1, "float32")
_TOKEN = Sampled(0)  # all answers are of it; questions tell conversations apart
_STEPS_OF_AN_ANSWER = 8  # that a client of a prefill rank is away


@dataclass(frozen=True, slots=True)
class Books:
    carried: tuple[KvGroup, ...]
    num_units: tuple[int, ...]  # of each of them
    num_pages: int
    page_size: int
    chunk_size: int = 512
    max_running_requests: int = 16

    def core(self) -> tuple[EngineCore, "CountingRunner"]:
        runner = CountingRunner(self)
        books = CarriedCache(
            runner.layout, self.num_units, index_block=self.page_size, chunk_size=self.chunk_size
        )
        cache = PrefixCache(
            self.num_pages, self.page_size, self.page_size, "replay", forget=books.points.forget
        )
        limits = Limits(self.max_running_requests, self.chunk_size)
        return EngineCore(runner, cache, limits, lambda: 1e-3 * runner.num_steps, books), runner


class CountingRunner:
    """It implements ModelRunner: it computes nothing and counts what it was asked for."""

    def __init__(self, books: Books) -> None:
        self.layout = KvLayout(books.page_size, books.page_size, 1, groups=(_FULL, *books.carried))
        self.memory = PoolMemory(0, books.num_pages)
        self.carried_memory: tuple[PoolMemory, ...] = ()
        self.draft = None
        self.vocab_size = self.max_context_tokens = 1 << 30
        self.max_step_drafts = 0
        self.mask_counts, self.steps_by_way = MaskCounts(), dict[str, int]()
        self.adapters = FakeAdapters()
        self.computed_tokens = self.num_steps = 0

    def when_launched(self, call: Callable[[], None]) -> bool:
        return False

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        self.num_steps += 1
        self.computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return [(_TOKEN,) if chunk.sample else () for chunk in chunks]

    def staging(self, slot_bytes: int) -> None:
        """Return None: nothing has to be copied."""

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        pass

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        return (memoryview(b"") for _ in pages)  # a replay has none

    def close(self) -> None:
        pass


class Rank(Protocol):
    def submit(self, prompt: TokenIds, answer_tokens: int) -> int:
        """A number for the request."""

    def step(self) -> list[int]:
        """Requests whose clients have their answers now."""


def replay(workload: Workload, rank: Rank, seed: int) -> None:
    """All turns, in a closed loop. Which conversation goes next is drawn, as bench.decode_cache.load does."""
    rng = random.Random(seed)
    waiting: deque[tuple[Conversation, list[TokenIds]]] = deque((c, []) for c in workload.conversations)
    asked: dict[int, tuple[Conversation, list[TokenIds]]] = {}
    while waiting or asked:
        while waiting and len(asked) < workload.concurrency:
            conversation, answers = waiting.popleft()
            number = rank.submit(prompt_of(conversation, answers), conversation.answer_tokens)
            asked[number] = conversation, answers
        for number in rank.step():
            conversation, answers = asked.pop(number)
            answers = [*answers, (_TOKEN.token_id,) * conversation.answer_tokens]
            if len(answers) < len(conversation.questions):
                waiting.insert(rng.randint(0, len(waiting)), (conversation, answers))


class PrefillRank:
    """It implements Rank. Pages are read as soon as a prompt is computed."""

    def __init__(self, books: Books) -> None:
        self._core, self._runner = books.core()
        self._arrivals = self._step = 0
        self._back_at: dict[int, int] = {}

    @property
    def computed_tokens(self) -> int:
        return self._runner.computed_tokens

    def submit(self, prompt: TokenIds, answer_tokens: int) -> int:
        self._arrivals += 1
        request = _request(self._arrivals, prompt, 1)
        seq = CoreSequence(
            request,
            self._arrivals,
            transfer_id=TransferId(self._arrivals),
            single_token=True,
            transfer_open=True,
        )
        self._core.submit(seq)
        return self._arrivals

    def step(self) -> list[int]:
        self._core.step()
        self._step += 1
        for seq, event in self._core.take_outputs():
            if isinstance(event, Token):
                self._core.transfer_ended(seq)
                self._back_at[seq.arrival] = self._step + _STEPS_OF_AN_ANSWER
        back = [number for number, step in self._back_at.items() if step <= self._step]
        for number in back:
            del self._back_at[number]
        return back


class DecodeRank:
    """It implements Rank. What prefill writes has landed a step after pages were lent."""

    def __init__(self, books: Books) -> None:
        self._core, _ = books.core()
        self._arrivals = 0
        self._receiving: list[CoreSequence] = []
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.least_tokens = 0  # that the least of all groups would have hit

    def submit(self, prompt: TokenIds, answer_tokens: int) -> int:
        self._arrivals += 1
        request = _request(self._arrivals, prompt, answer_tokens)
        self._core.submit(CoreSequence(request, self._arrivals, receives=True))
        self.prompt_tokens += len(prompt)
        return self._arrivals

    def step(self) -> list[int]:
        landed, self._receiving = self._receiving, []
        for seq in landed:
            self._core.landed(seq, _TOKEN)
        self._core.step()
        ended = []
        for seq, event in self._core.take_outputs():
            if isinstance(event, Reserved):
                self._receiving.append(seq)
                self.hit_tokens += event.prefix_len
                self.least_tokens += self._resumable(seq, event.prefix_len)
            elif isinstance(event, Token) and event.finished is not None:
                ended.append(seq.arrival)
        return ended

    def _resumable(self, seq: CoreSequence, matched: int) -> int:
        found = self._core.cache.look_up(seq.ids, "")
        return self._core.carried.resumable(found.deepest, matched)


def _request(number: int, prompt: TokenIds, max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(f"{number}", prompt, sampling)


def mixed(seed: int, quick: bool = False) -> Workload:
    """Conversations, groups that share a system prompt, and long prompts that nobody repeats, shuffled."""
    parts = 1 if quick else 2
    asked: list[Conversation] = []
    for part in range(parts):
        for workload in (workloads.turns(seed + part, quick), workloads.groups(seed + part, quick)):
            asked += [replace(c, name=f"{workload.name}{part}/{c.name}") for c in workload.conversations]
    ids, rng = Ids(seed), random.Random(seed)
    asked += [Conversation(f"once/{i}", (ids.take(f"once/{i}", 1024),), 64) for i in range(len(asked) // 5)]
    rng.shuffle(asked)
    return Workload("mixed", tuple(asked), 16, 0, held_share=None, plans=frozenset({Plan.REMOTE}))


def points_in_use(workload: Workload) -> int:
    """Checkpoints that are wanted at some time: one a conversation with turns, one a shared beginning."""
    beginnings = [c.questions[0][:64] for c in workload.conversations]
    of_turns = sum(len(c.questions) > 1 for c in workload.conversations)
    return of_turns + sum(beginnings.count(beginning) > 1 for beginning in set(beginnings))


_RUNNING = 16
_UNLIMITED = 1 << 16  # units: none is ever short
_CHUNK = 512


def hit_row(model: Model, workload: Workload, num_pages: int, page_size: int, seed: int) -> Row:
    """Decode ranks that differ by what they carry, with as many pages and the least of units."""
    units = units_for(model.group, page_size, _CHUNK, _RUNNING)
    ours = DecodeRank(Books((model.group,), (units,), num_pages, page_size, _CHUNK, _RUNNING))
    attention = DecodeRank(Books((), (), num_pages, page_size, _CHUNK, _RUNNING))
    for rank in (ours, attention):
        replay(workload, rank, seed)
    return {
        "model": model.name,
        "workload": workload.name,
        "prompt_tokens": ours.prompt_tokens,
        "attention_alone": attention.hit_tokens,
        "per_group": ours.hit_tokens,
        "least_of_all": ours.least_tokens,
        "of_attention": ours.hit_tokens / attention.hit_tokens,
    }


def computed_rows(model: Model, workload: Workload, num_pages: int, page_size: int, seed: int) -> list[Row]:
    """Prefill ranks that differ by how many checkpoints they keep beside what runs."""
    wanted = points_in_use(workload)
    unlimited = _computed(model, workload, _UNLIMITED, num_pages, page_size, seed)
    attention = PrefillRank(Books((), (), num_pages, page_size, _CHUNK, _RUNNING))
    replay(workload, attention, seed)
    rows: list[Row] = []
    for points in sorted({wanted // 4, wanted // 2, wanted, 2 * wanted}):
        computed = _computed(model, workload, points, num_pages, page_size, seed)
        rows.append(
            {
                "model": model.name,
                "workload": workload.name,
                "points": points,
                "come_back": wanted,
                "enough": points >= wanted,
                "computed_tokens": computed,
                "unlimited": unlimited,
                "of_unlimited": computed / unlimited,
                "of_full_attention": computed / attention.computed_tokens,
            }
        )
    return rows


def _computed(
    model: Model, workload: Workload, points: int, num_pages: int, page_size: int, seed: int
) -> int:
    of_a_point = units_at(model.group, 4 * max(model.group.window, page_size), page_size)
    units = units_for(model.group, page_size, _CHUNK, 2 * _RUNNING) + points * of_a_point
    rank = PrefillRank(Books((model.group,), (units,), num_pages, page_size, _CHUNK, _RUNNING))
    replay(workload, rank, seed)
    return rank.computed_tokens


def pages_for(workload: Workload, page_size: int) -> int:
    return sum(-(-conversation.num_tokens // page_size) + 1 for conversation in workload.conversations)
