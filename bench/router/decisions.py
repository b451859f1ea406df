"""This part measures what one placement decision costs: the router's placer in this process, with an index
and loads around it.

A prompt is a turn of one of many conversations (its first nine tenths are cached on one decode rank, eight
tenths on one prefill rank, and a system prompt on all) or, one in four, a new one. What was sent is admitted
and ends some decisions later; ranks report their loads meanwhile.

    hash    the names of its blocks, from packed ids
    match   the index's answers within the placer
    place   all of the placer: match, candidates, prices, choice
    books   what is noted of it: sent, admitted, finished, ended
    refuse  all of the placer, where every rank is full
    below   the placer where ranks have tiers, over the same without, decision by decision in turns: of 64
            decode ranks each keeps 125,000 blocks, half of them in files, and all of a conversation is kept
            by its rank, three fifths by another one

Times are the thread's own CPU time.
"""

import gc
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bench.report import Row, verdict
from services.index.read.prefix_index import Held, PrefixIndex
from services.kv.block_hash import scope_seed, sequence_hashes
from services.router.placement.candidates import Asked
from services.router.placement.decision import Decision
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.values.errors import NoCapacity
from services.values.kv import KvLayout, PageBooks
from services.values.rank import Generation, Plan, RankAddress, RankId, RankKey, Role
from services.values.rank_reports import RankLoad, Registration
from services.values.request import Admitted

LAYOUTS = ((4, 4), (8, 64), (200, 800))  # prefill and decode ranks
PROMPT_TOKENS = (1_000, 8_000, 100_000)
_DECISIONS = 400
_INDEX_BLOCK = 64
_SYSTEM_BLOCKS = 8
_CONVERSATIONS = 48
_NEW_SHARE = 0.25
_ENTRIES = 1_000_000  # in the index, of all ranks together
_PER_RANK_IN_FLIGHT = 2
_REFUSALS = 100
_MAX_WAIT_S = 5.0  # of what is refused
_GAP_S = 0.01  # between two decisions, on the clock that the placer is given
_LAYOUT = KvLayout(page_size=64, page_bytes=64 * 131_072, model_fingerprint=1)
_TOTAL_PAGES = 20_000
_SEED = scope_seed("bench")
_MOST_US = 1_000.0
_BELOW_A_RANK = 125_000
_MOST_BELOW = 1.25
_BELOW_TURNS = 5


class _TimedIndex(PrefixIndex):
    """Counts the CPU time of its answers, less that of reading the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.spent_ns = 0

    def held(self, hashes: Sequence[int]) -> Held:
        began = time.thread_time_ns()
        held = super().held(hashes)
        self.spent_ns += time.thread_time_ns() - began - _CLOCK_NS
        return held


def _clock_ns() -> int:
    spans = []
    for _ in range(1_000):
        began = time.thread_time_ns()
        spans.append(time.thread_time_ns() - began)
    return int(median(spans))


_CLOCK_NS = _clock_ns()


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Packed ids; `pinned` is where the conversation's last turn ran."""

    ids: "array[int]"
    pinned: RankKey | None = None


@dataclass(slots=True)
class _Spent:
    """It has the nanoseconds of each decision."""

    hash: list[int] = field(default_factory=list)
    match: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    books: list[int] = field(default_factory=list)


class _Router:
    """A placer with ranks that hold `conversations`."""

    def __init__(
        self,
        prefill: int,
        decode: int,
        prompt_tokens: int,
        index: PrefixIndex,
        below: PrefixIndex | None = None,
    ) -> None:
        self._rng = random.Random(prompt_tokens + decode)
        self._draw = np.random.default_rng(prompt_tokens + decode)
        self._now = 0.0
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._decodes = [_registration(Role.DECODE, number) for number in range(decode)]
        self._prefills = [_registration(Role.PREFILL, number) for number in range(prefill)]
        self._balance = Balance(lambda: self._now)
        settings = PlacerSettings(_INDEX_BLOCK, 2_048, PriceWeights())
        self._below = below
        self.placer = Placer(settings, index, self._balance, lambda rank: None, lambda rank: True, below)
        self.placer.set_ranks(self._decodes, self._prefills)
        for rank in (*self._decodes, *self._prefills):
            self._report(rank)
        self._system = self._ids(_SYSTEM_BLOCKS * _INDEX_BLOCK)
        self._conversations = [self._conversation() for _ in range(_CONVERSATIONS)]
        self._fill_index()
        if below is not None:
            self._fill_below(below)
        self._in_flight: deque[tuple[str, Asked, Decision, _Prompt]] = deque()

    def next_prompt(self) -> _Prompt:
        if self._rng.random() < _NEW_SHARE:
            return _Prompt(self._with_system(self._ids(self._prompt_tokens)))
        prompt = self._rng.choice(self._conversations)
        return prompt if self._rng.random() < 0.5 else _Prompt(prompt.ids)

    def pass_time(self) -> None:
        self._now += _GAP_S
        for rank in self._rng.sample([*self._decodes, *self._prefills], 4):
            self._report(rank)

    def fill(self) -> None:
        """So much is queued at every rank that it waits longer than it may."""
        for rank in (*self._decodes, *self._prefills):
            self._report(rank, queued_tokens=100_000)

    def settle(self, name: str, asked: Asked, decision: Decision, prompt: _Prompt) -> int:
        """Note what was decided, and the end of what was decided long ago; nanoseconds."""
        self._in_flight.append((name, asked, decision, prompt))
        most = _PER_RANK_IN_FLIGHT * len(self._decodes)
        ending = self._in_flight.popleft() if len(self._in_flight) > most else None
        began = time.thread_time_ns()
        self.placer.sent(name, asked.hashes, asked.prompt_tokens, decision)
        self.placer.outcomes.admitted(name, asked.hashes, decision.chosen, _admitted(decision, asked))
        if ending is not None:
            self.placer.outcomes.finished(ending[1].hashes, ending[2].chosen, ending[3].ids, _SEED)
            self.placer.outcomes.ended(ending[0])
        return time.thread_time_ns() - began - _CLOCK_NS

    def _ids(self, count: int) -> "array[int]":
        return array("I", self._draw.integers(0, 128_000, count, dtype=np.uint32).tobytes())

    def _with_system(self, ids: "array[int]") -> "array[int]":
        return (self._system + ids)[: self._prompt_tokens]

    def _conversation(self) -> _Prompt:
        ids = self._with_system(self._ids(self._prompt_tokens))
        hashes = sequence_hashes(ids, _INDEX_BLOCK, _SEED)
        decode, prefill = self._rng.choice(self._decodes), self._rng.choice(self._prefills)
        for rank, share in ((decode, 0.9), (prefill, 0.8)):
            self._hold(rank.id, hashes[: int(share * len(hashes))])
        return _Prompt(ids, decode.id.key)

    def _fill_index(self) -> None:
        ranks = [*self._decodes, *self._prefills]
        system = sequence_hashes(self._system, _INDEX_BLOCK, _SEED)
        for rank in ranks:
            drawn: list[int] = self._draw.integers(0, 2**64, _ENTRIES // len(ranks), dtype=np.uint64).tolist()
            self._hold(rank.id, [*system, *drawn])

    def _fill_below(self, below: PrefixIndex) -> None:
        for rank in self._decodes:
            drawn = array("Q", self._draw.integers(0, 2**64, _BELOW_A_RANK, dtype=np.uint64).tobytes())
            below.take_snapshot(rank.id, drawn, drawn[::2])
        for prompt in self._conversations:
            hashes = array("Q", sequence_hashes(prompt.ids, _INDEX_BLOCK, _SEED))
            [home] = [rank for rank in self._decodes if rank.id.key == prompt.pinned]
            for rank, share in ((home, 1.0), (self._rng.choice(self._decodes), 0.6)):
                kept = hashes[: int(share * len(hashes))]
                below.apply_delta(rank.id, kept, (), files_added=kept[: len(kept) // 2])

    def _hold(self, rank: RankId, hashes: Sequence[int]) -> None:
        if not self._index.apply_delta(rank, array("Q", hashes), ()):
            self._index.apply_snapshot(rank, hashes)

    def _report(self, rank: Registration, queued_tokens: int = 0) -> None:
        rng = self._rng
        free = rng.randrange(_TOTAL_PAGES)
        load = RankLoad(
            running=rng.randrange(32),
            waiting=rng.randrange(3),
            pending_tokens=queued_tokens + rng.randrange(20_000),
            books=PageBooks(_TOTAL_PAGES, free, _TOTAL_PAGES - free, 0, 0, 0),
            step_s=0.02,
            prefill_tokens_per_s=8_000.0,
            memory_tier_bytes_per_s=6e9,
            file_tier_bytes_per_s=2e9,
        )
        self._balance.report(rank.id.key, load)


def rows() -> Iterator[Row]:
    for prefill, decode in LAYOUTS:
        for prompt_tokens in PROMPT_TOKENS:
            yield _row(prefill, decode, prompt_tokens)


def below_rows() -> Iterator[Row]:
    prefill, decode = LAYOUTS[1]
    for prompt_tokens in PROMPT_TOKENS:
        without = _Router(prefill, decode, prompt_tokens, PrefixIndex())
        with_tiers = _Router(prefill, decode, prompt_tokens, PrefixIndex(), PrefixIndex())
        sides = _Spent(), _Spent()
        gc.freeze()
        for _ in range(_BELOW_TURNS):
            # Other work on the machine, which comes and goes, slows both down alike.
            for _ in zip(_decide(without, sides[0]), _decide(with_tiers, sides[1]), strict=True):
                pass
        p50s = [float(np.percentile(side.place, 50)) / 1e3 for side in sides]
        yield {
            "ranks": prefill + decode,
            "prompt tokens": prompt_tokens,
            "without p50": p50s[0],
            "with p50": p50s[1],
            "ratio": p50s[1] / p50s[0],
        }


def _row(prefill: int, decode: int, prompt_tokens: int) -> Row:
    """All but `match` of a run whose index reads no clock."""
    router = _Router(prefill, decode, prompt_tokens, PrefixIndex())
    spent, refusing = _run(router), _refuse(router)
    index = _TimedIndex()
    matching = _run(_Router(prefill, decode, prompt_tokens, index), lambda: index.spent_ns)
    both = [sum(parts) for parts in zip(spent.hash, spent.place, strict=True)]
    return {
        "ranks": prefill + decode,
        "prompt tokens": prompt_tokens,
        **_percentiles("hash", spent.hash),
        **_percentiles("match", matching.match),
        **_percentiles("place", spent.place),
        **_percentiles("hash+place", both),
        **_percentiles("books", spent.books),
        **_percentiles("refuse", refusing),
    }


def _run(router: _Router, matched_ns: Callable[[], int] = lambda: 0) -> _Spent:
    """`matched_ns`: spent matching so far."""
    gc.freeze()  # A router does so when it has read the index.
    spent = _Spent()
    for _ in _decide(router, spent, matched_ns):
        pass
    return spent


def _decide(router: _Router, spent: _Spent, matched_ns: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Yield after each decision, whose times are then in `spent`."""
    rng = random.Random(1)
    for number in range(_DECISIONS):
        router.pass_time()
        prompt, tie, matched = router.next_prompt(), rng.random(), matched_ns()
        began = time.thread_time_ns()
        hashes = tuple(sequence_hashes(prompt.ids, _INDEX_BLOCK, _SEED))
        hashed = time.thread_time_ns()
        asked = Asked(hashes, len(prompt.ids), frozenset(Plan), prompt.pinned)
        decision = router.placer.place(asked, tie)
        placed = time.thread_time_ns()
        spent.hash.append(hashed - began - _CLOCK_NS)
        spent.place.append(placed - hashed - _CLOCK_NS)
        spent.match.append(matched_ns() - matched)
        spent.books.append(router.settle(str(number), asked, decision, prompt))
        yield


def _refuse(router: _Router) -> list[int]:
    """Return the nanoseconds of each refusal."""
    router.fill()
    rng, spent = random.Random(2), list[int]()
    for _ in range(_REFUSALS):
        prompt, tie = router.next_prompt(), rng.random()
        hashes = tuple(sequence_hashes(prompt.ids, _INDEX_BLOCK, _SEED))
        asked = Asked(hashes, len(prompt.ids), frozenset(Plan), prompt.pinned, max_wait_s=_MAX_WAIT_S)
        began = time.thread_time_ns()
        with suppress(NoCapacity):
            router.placer.place(asked, tie)
            raise AssertionError("it was not refused")
        spent.append(time.thread_time_ns() - began - _CLOCK_NS)
    return spent


def _percentiles(name: str, spent_ns: Sequence[int]) -> Row:
    """All times are in microseconds."""
    p50, p99 = np.percentile(spent_ns, (50, 99)) / 1e3
    return {f"{name} p50": float(p50), f"{name} p99": float(p99)}


def _registration(role: Role, number: int) -> Registration:
    rank = RankId(role.value, number, Generation(number + 1))
    address = RankAddress(rank, "127.0.0.1:1")
    return Registration(role, address, _LAYOUT, "bench", 131_072, _TOTAL_PAGES, "fake")


def _admitted(decision: Decision, asked: Asked) -> Admitted:
    chosen, tokens = decision.chosen, asked.prompt_tokens
    decode_hit = min(chosen.decode.hit_tokens, tokens - 1)
    prefill_hit = 0 if chosen.prefill is None else min(chosen.prefill.hit_tokens, tokens - 1)
    computed = tokens - (decode_hit if chosen.prefill is None else prefill_hit)
    return Admitted(
        prompt_tokens=tokens,
        decode_prefix_len=decode_hit,
        prefill_prefix_len=prefill_hit,
        computed_tokens=computed,
        kv_bytes_moved=0,
        kv_bytes_prompt=tokens * 131_072,
        decode_queue_s=0.0,
        prefill_queue_s=0.0,
        prefill_compute_s=computed / 8_000,
        transfer_s=0.0,
        plan=chosen.plan,
    )


def below_goals(rows: Sequence[Row]) -> list[Row]:
    return [
        verdict(
            f"place {row['prompt tokens']:,} tokens, with tiers over without",
            "<=",
            _MOST_BELOW,
            row["ratio"],
        )
        for row in rows
    ]


def goals(rows: Sequence[Row]) -> list[Row]:
    return [
        verdict(
            f"us to place {row['prompt tokens']:,} tokens on {row['ranks']:,} ranks, p99",
            "<=",
            _MOST_US,
            row["place p99"],
        )
        for row in rows
    ]
