"""The engine core asks these things of whoever drafts, and gives drafts room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.engine.paged import batch, sequence
from services.engine.paged.carrying import Carrying
from services.engine.paged.drafts.proposal import Proposal
from services.engine.paged.queue.step_time import StepTimes
from services.engine.paged.runner import Chunk, ModelRunner
from services.kv.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Wish:
    seq: sequence.Sequence
    most: int


class Drafting(Protocol):
    """It is called from the engine's thread only. Nothing that it says changes what is generated."""

    def propose(
        self, wishes: Sequence[Wish], max_drafts: int, step_times: StepTimes
    ) -> Sequence[Proposal | None]:
        """Return for each wish what to verify, if anything; no more than `max_drafts` together."""

    def note(self, seq: sequence.Sequence, proposal: Proposal, num_accepted: int) -> None:
        """Note that a step has verified it: its first `num_accepted` ids were right, and are among
        seq.ids."""

    def ended(self, seq: sequence.Sequence) -> None:
        """Note that it asks for nothing any more, whether it ever did or not. Its ids are still there."""


class RoomAhead:
    """It finds pages of `cache`, and of the per-request state, for drafts that nobody else needs at
    present."""

    def __init__(
        self, cache: PrefixCache, carrying: Carrying, runner: ModelRunner, max_context_tokens: int
    ) -> None:
        self._cache = cache
        self._carrying = carrying
        self._runner = runner
        self._page_size = runner.layout.page_size
        self._max_context_tokens = max_context_tokens

    def most_drafts(self, seq: sequence.Sequence) -> int:
        return self._carrying.most_ahead(seq, batch.most_drafts(seq, self._max_context_tokens))

    def chunk_of(self, seq: sequence.Sequence, proposal: Proposal | None) -> Chunk:
        if proposal is None:
            self._carrying.chunk_end(seq, len(seq.ids))
            return batch.chunk_of(seq, 1, self._page_size)
        ids = batch.usable_drafts(seq, proposal.ids, self.most_drafts(seq), self._runner.vocab_size)
        end = len(seq.ids) + self._grow(seq, len(ids))
        ids = ids[: self._carrying.chunk_end(seq, end) - len(seq.ids)]
        seq.proposal = replace(proposal, ids=ids) if ids else None
        return batch.chunk_of(seq, 1, self._page_size, ids)

    def give_back(self, seq: sequence.Sequence) -> None:
        """Give back pages that only wrong drafts reached: for want of one another could be retracted."""
        assert seq.pages is not None
        needed = -(-len(seq.ids) // self._page_size)
        if len(seq.pages.pages) > needed:
            self._cache.shorten(seq.pages, needed)

    def _grow(self, seq: sequence.Sequence, num_drafts: int) -> int:
        """Return for how many of its drafts there are slots; nothing cached goes for a guess, and nobody."""
        assert seq.pages is not None
        missing = -(-(len(seq.ids) + num_drafts) // self._page_size) - len(seq.pages.pages)
        if (can_have := min(missing, self._cache.books().free)) > 0:
            self._cache.extend(seq.pages, can_have)
        return min(num_drafts, len(seq.pages.pages) * self._page_size - len(seq.ids))
