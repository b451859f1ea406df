"""A core reports its load, what its tree gained and lost, and whether its books balance."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from services.engine.paged.drafts.acceptance import DraftCounts
from services.engine.paged.queue.gate import Gate
from services.engine.paged.queue.step_figures import StepFigures
from services.engine.paged.sequence import Phase, Sequence
from services.kv.carried.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.values.kv import CacheEvents, PageBooks
from services.values.load import RankLoad


@dataclass(frozen=True, slots=True)
class Reports:
    cache: PrefixCache
    carried: CarriedCache
    gate: Gate
    figures: StepFigures
    drafts: DraftCounts

    def load(self, active: Collection[Sequence], num_kept: int, retractions: int) -> RankLoad:
        """`num_kept` sequences have ended, but a transfer may still read their pages."""
        gate, carried = self.gate, self.carried
        pending = sum(s.uncomputed_tokens for s in gate)
        pending += sum(s.remaining_tokens for s in active if s.phase is Phase.COMPUTING)
        decoding = sum([s.phase is Phase.DECODING for s in active])
        return RankLoad(
            running=len(active) + num_kept,
            waiting=len(gate),
            admitted_per_s=gate.admitted_per_s,
            pending_tokens=pending,
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
            resume_points=len(carried.points),
            evicted_points=carried.points.evictions,
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
        """Walk the books; `num_holders` sequences hold pages.

        Raises:
            AssertionError: they do not balance, or pages are held by no sequence.
        """
        books = self.cache.check()
        num_open = self.cache.num_open
        assert num_open == num_holders, f"{num_open} open, {num_holders} sequences hold pages"
        self.carried.check()
        num_open = self.carried.num_open
        assert num_open == num_holders, f"{num_open} hold what is carried, {num_holders} sequences hold pages"
        return books
