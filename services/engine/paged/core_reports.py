"""A core reports its load, its steps' figures and its tree's changes, and checks that its books balance."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from services.engine.paged.admitting import Limits
from services.engine.paged.draft_chances import DraftCounts
from services.engine.paged.gate import Gate
from services.engine.paged.in_common import InCommon
from services.engine.paged.model_runner import RunnerFailed
from services.engine.paged.pulls import Pulls
from services.engine.paged.sequence import Phase, Sequence
from services.engine.paged.step_time import StepTimes
from services.engine.paged.waiting_queue import ChunkTurns
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.values.kv import CacheEvents, PageBooks
from services.values.rank_reports import NO_STEPS, RankLoad


class StepFigures:
    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self.times = StepTimes()
        self.step_s = 0.0  # It is a mean in seconds, and 0 before the first step.
        # It is the time that the current step spent on drafts, before its batch was ready.
        self.drafting_s = 0.0
        self.decode_steps = self.prompt_steps = NO_STEPS
        self.failed = 0  # It counts the failures in a row.
        self.prompt_tokens = 0  # It counts those computed since the start, whatever became of their requests.

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed += 1
            raise RunnerFailed(type(error).__name__) from error

    @contextmanager
    def drafting(self) -> Iterator[None]:
        began = self._clock()
        with self.noting_failures():
            yield
        self.drafting_s = self._clock() - began

    def note(self, num_decoding: int, num_drafts: int, prompt_tokens: int, took_s: float) -> None:
        self.failed = 0
        self.prompt_tokens += prompt_tokens
        self.times.note(num_decoding, prompt_tokens, took_s, num_drafts)
        whole_s = took_s + self.drafting_s
        self.step_s = whole_s if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * whole_s
        if prompt_tokens:
            self.prompt_steps = self.prompt_steps.with_steps(whole_s)
        else:
            self.decode_steps = self.decode_steps.with_steps(whole_s)

    def chunk_tokens(self, num_decoding: int, num_drafts: int) -> int:
        return self._chunk_tokens(num_decoding, num_drafts, self.drafting_s)

    def prefill_tokens_per_s(self, num_decoding: int) -> float:
        return self.times.effective_tokens_per_s(num_decoding, self._chunk_tokens(num_decoding, 0, 0.0))

    def _chunk_tokens(self, num_decoding: int, num_drafts: int, drafting_s: float) -> int:
        limits = self.limits
        left_s = limits.itl_target_s - drafting_s if limits.itl_target_s is not None else None
        return self.times.chunk_tokens(num_decoding, left_s, limits.chunk_size, num_drafts)


@dataclass(frozen=True, slots=True)
class Reports:
    cache: PrefixCache
    carried: CarriedCache
    gate: Gate
    in_common: InCommon
    figures: StepFigures
    drafts: DraftCounts
    pulls: Pulls
    turns: ChunkTurns

    def load(self, active: Collection[Sequence], num_kept: int, retractions: int) -> RankLoad:
        gate, carried = self.gate, self.carried
        pending = sum(s.uncomputed_tokens for s in gate)
        computing, limits = [s for s in active if s.phase is Phase.COMPUTING], self.figures.limits
        pending += sum(s.remaining_tokens for s in computing)
        decoding = sum([s.phase is Phase.DECODING for s in active])
        return RankLoad(
            running=len(active) + num_kept,
            waiting=len(gate),
            admitted_per_s=gate.admitted_per_s,
            pending_tokens=pending,
            common_tokens=self.in_common.tokens(gate, active),
            overtaken=self.turns.overtaken(computing, limits.shorter_first, limits.chunk_size),
            waiting_tokens=sum(s.uncached_tokens for s in gate),
            books=self.cache.books(),
            step_s=self.figures.step_s,
            prefill_tokens_per_s=self.figures.prefill_tokens_per_s(decoding),
            retractions=retractions,
            overtakes=gate.overtakes,
            computed_tokens=self.figures.prompt_tokens,
            free_runs=self.cache.free_runs,
            lent_pages=self.cache.lent_pages,
            lent_runs=self.cache.lent_runs,
            reserved_pages=gate.reserved_pages,
            carried=carried.pools(),
            checkpoints=len(carried.points),
            evicted_points=carried.points.evictions,
            granted_pages=self.pulls.granted_pages,
            tokens_per_step=self.drafts.tokens_per_step,
            drafts=self.drafts.by_source(),
            decode_steps=self.figures.decode_steps,
            prompt_steps=self.figures.prompt_steps,
        )

    def take_cache_events(self) -> CacheEvents:
        events = self.cache.take_events()
        stored, removed = self.carried.points.events.take()
        if not (stored or removed):
            return events
        return replace(events, resumable_stored=stored, resumable_removed=removed)

    def check(self, num_holders: int) -> PageBooks:
        books = self.cache.check()
        num_holders += self.pulls.num_holders
        num_open = self.cache.num_open
        assert num_open == num_holders, f"{num_open} open, {num_holders} sequences and grants hold pages"
        self.carried.check()
        num_open = self.carried.num_open
        assert num_open == num_holders, f"{num_open} hold what is carried, {num_holders} sequences hold pages"
        return books
