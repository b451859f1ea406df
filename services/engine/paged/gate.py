"""The gate admits waiting sequences to the pool if enough pages are free for them and for all that run.

admitting.py decides. The gate makes a round of decisions only when there is news, which is anything that may
let somebody in: weighing takes time, and decoding sequences would feel it at every token.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set
from collections.abc import Sequence as SequenceOf

from services.engine.paged.admitting import (
    Growing,
    Growth,
    Limits,
    Newcomer,
    OutputEstimate,
    QueueRate,
)
from services.engine.paged.fair_share import FairShare
from services.engine.paged.sequence import RUNNING, WITH_SLOT, Phase, Sequence
from services.engine.paged.step_time import StepTimes
from services.engine.paged.waiting_queue import WaitingQueue, gives_way, tenant_of
from services.kv.prefix_cache import PrefixCache
from services.values.errors import DeadlineExceeded

_ENOUGH_CHUNKS = 4
_NOBODY = frozenset[str]()


class BatchSlots:
    def __init__(self, limits: Limits, times: StepTimes, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._times = times
        self._clock = clock

    def one_more_runs(self, active: SequenceOf[Sequence]) -> bool:
        return self._allows(sum(seq.phase in WITH_SLOT for seq in active) + 1, receiving=0)

    def one_more_receives(self, active: SequenceOf[Sequence]) -> bool:
        """Return whether one more would find a slot once all have landed; overdue sequences do not count."""
        now_s = self._clock()
        overdue = sum(self._is_overdue(seq, now_s) for seq in active)
        receiving = sum(seq.phase not in WITH_SLOT for seq in active) - overdue
        return self._allows(len(active) - overdue + 1, receiving)

    def _is_overdue(self, seq: Sequence, now_s: float) -> bool:
        since_s = seq.admitted_s
        waited = since_s is not None and now_s - since_s >= self.limits.patience.wait_s
        return waited and seq.phase is Phase.RECEIVING

    def _allows(self, batch: int, receiving: int) -> bool:
        target_s = self.limits.itl_target_s
        if batch > self.limits.max_running_requests:
            return False
        return target_s is None or self._times.allows(batch, target_s, receiving)


def _running(active: Collection[Sequence]) -> Counter[str]:
    return Counter(map(tenant_of, active))


class Gate:
    def __init__(
        self,
        cache: PrefixCache,
        max_context_tokens: int,
        limits: Limits,
        clock: Callable[[], float],
        shares: FairShare,
    ) -> None:
        self._cache = cache
        self._max_context_tokens = max_context_tokens
        self._clock = clock
        self._shares = shares
        self._chunk_size = limits.chunk_size
        self._enough_tokens = _ENOUGH_CHUNKS * limits.chunk_size
        self._queue = WaitingQueue(limits.patience, shares)
        self._rate = QueueRate()
        self._output_estimate = OutputEstimate(limits.expected_output)
        self._news = 0
        # Nothing could be admitted at this count of news. The others tell whether sequences that receive
        # their KV, and those that compute it here, were allowed then.
        self._blocked_at = (-1, True, True)
        # At this count of news, an exchange of these two sequences would not have freed enough.
        self._no_exchange: tuple[int, Sequence, Sequence] | None = None
        self.reserved_pages = 0  # These are for the growth of running sequences, as of the last look.
        self.overtakes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def admitted_per_s(self) -> float:
        return self._rate.per_s(self._clock())

    # -- what happens -----------------------------------------------------------------------------

    def note_news(self) -> None:
        self._news += 1

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq)
        if seq.admitted_s is not None:
            self._rate.came_back()
        now_s = self._clock()
        self._rate.waits(now_s)
        seq.timer.queues(now_s)
        self._news += 1

    def remove(self, seq: Sequence) -> None:
        self._queue.remove(seq)
        self._note_if_empty()
        self._news += 1

    def note_end(self, seq: Sequence) -> None:
        if not seq.single_token:
            self._output_estimate.ended(seq.num_output, self._allowed_tokens(seq))

    def note_retraction(self) -> None:
        self._output_estimate.retracted()

    # -- who comes in -----------------------------------------------------------------------------

    def next(
        self, active: Collection[Sequence], *, may_receive: bool = True, may_compute: bool = True
    ) -> Sequence | None:
        """Return who would come in beside `active`, or None where nobody fits who may come in."""
        if not self._queue or self._is_blocked(may_receive, may_compute):
            return None
        ahead = self._ahead(active)
        if ahead and ahead >= self._queue.tenants:
            return None
        self._order(active)
        growth = self._growth(active)
        self.reserved_pages = growth.peak
        available = self._cache.available_pages

        def fits(seq: Sequence, waiting: Newcomer) -> bool:
            if not (may_receive if seq.receives else may_compute) or tenant_of(seq) in ahead:
                return False
            if not active or waiting.num_pages > available:
                return waiting.num_pages <= available
            return waiting.num_pages + growth.peak_with(self._newcomer(seq, waiting)) <= available

        def looks_small(seq: Sequence) -> bool:
            return self._pages_wanted(seq) + self.reserved_pages <= available

        seq = self._queue.next(self._weigh, fits, looks_small, self._clock())
        if seq is None and not ahead:
            self._blocked_at = (self._news, may_receive, may_compute)
        return seq

    def exchange(
        self, active: Collection[Sequence], has_place: Callable[[Sequence, list[Sequence]], bool]
    ) -> tuple[Sequence, Sequence] | None:
        """Return which sequence is to come in, the first in turn, and which of `active` goes back for it.

        The one that goes back belongs to a tenant that will still run no fewer sequences than the other's
        tenant. `has_place(seq, others)` tells whether `seq` could run beside the others, apart from pages.

        Returns:
            None where the tenants run equally many, or where sending one back would not free enough.
        """
        if not (self._queue and self._are_of_others(active)):
            return None
        self._order(active)
        seq = next(iter(self._queue))
        # A sequence that has landed and waits for its slot has no slot to give.
        candidates = [each for each in active if seq.receives or each.phase in RUNNING]
        victim = gives_way(seq, candidates, self._shares)
        if victim is None:
            return None
        others = [each for each in active if each is not victim]
        if self._no_exchange == (self._news, seq, victim) or not has_place(seq, others):
            return None
        if not self._would_fit(seq, others, victim):
            self._no_exchange = (self._news, seq, victim)
            return None
        return seq, victim

    def _ahead(self, active: Collection[Sequence]) -> Set[str]:
        """Return the tenants of which enough prompts are let in and not computed yet. So slots stay free for
        others, and who comes next is chosen later."""
        if not self._shares.is_on:
            return _NOBODY
        computing = Counter[str]()
        for seq in active:
            computing[tenant_of(seq)] += seq.remaining_tokens
        return {tenant for tenant, tokens in computing.items() if tokens >= self._enough_tokens}

    def _order(self, active: Collection[Sequence]) -> None:
        self._queue.order(_running(active))

    def _are_of_others(self, active: Collection[Sequence]) -> bool:
        first = tenant_of(next(iter(self._queue)))
        return not self._queue.is_of_one_tenant or any(tenant_of(seq) != first for seq in active)

    def _would_fit(self, seq: Sequence, others: list[Sequence], victim: Sequence) -> bool:
        assert victim.pages is not None
        available = self._cache.available_pages + self._cache.own_pages(victim.pages)
        waiting = self._weigh(seq)
        growth = Growth(self._growing(others), self._cache.page_size)
        return waiting.num_pages + growth.peak_with(self._newcomer(seq, waiting)) <= available

    def _is_blocked(self, may_receive: bool, may_compute: bool) -> bool:
        news, received, computed = self._blocked_at
        same = news == self._news and may_receive <= received and may_compute <= computed
        return same or not (may_receive or may_compute)

    def reserve(self, seq: Sequence, active: Collection[Sequence]) -> bool:
        """Admit whom `next` or `exchange` returned: lock the cached prefix, and allocate the other pages.

        Returns:
            False where part of that prefix was evicted for another admission after the weighing. The sequence
            then keeps waiting, and is weighed again.
        """
        assert seq.lookup is not None
        pages = self._cache.open(seq.ids, seq.request.kv_scope, seq.matchable_tokens, protect=False)
        if len(pages.pages) < seq.lookup.cached_pages:
            self._cache.close(pages)
            seq.lookup = None
            return False
        fitted = self._cache.extend(pages, self._pages_wanted(seq) - len(pages.pages))
        assert fitted, f"{seq} does not fit into {self._cache} though it was found to"
        seq.pages = pages
        if seq.retractions == 0:  # Otherwise it has matched what it computed itself.
            self._cache.protect(pages)
        if seq.lookup.cached_pages > seq.lookup.locked_pages:
            self._news += 1  # Sequences that share this prefix now find it locked.
        self._order(active)
        now_s = self._clock()
        self.overtakes += self._queue.take(seq, now_s)
        self._rate.taken(now_s)
        seq.timer.waits(now_s)
        self._note_if_empty()
        return True

    def too_late(self, seq: Sequence, times: StepTimes) -> DeadlineExceeded | None:
        """Return an error where the next token of whom `next` returned cannot come by its deadline, even if
        its prompt is computed twice as fast as others were.

        Others may have been short, at a lower rate. So each whole chunk is taken to need a step like theirs.
        """
        if (due_s := seq.due_s) is None or seq.receives or seq.source is not None:
            return None
        if not (step_s := times.prompt_step_s):  # Nothing is known yet.
            return None
        assert seq.lookup is not None
        tokens = len(seq.ids) - seq.lookup.cached_pages * self._cache.page_size
        left_s, needed_s = due_s - self._clock(), tokens / self._chunk_size * step_s / 2
        if needed_s <= left_s:
            return None
        return DeadlineExceeded(
            f"{tokens} tokens of the prompt are still to be computed, which takes {needed_s:.2g} s or more, "
            f"and {max(0.0, left_s):.2g} s are left"
        )

    def _note_if_empty(self) -> None:
        if not self._queue:
            self._rate.empty()

    def _weigh(self, seq: Sequence) -> Newcomer:
        if seq.lookup is None or seq.looked_up_at != self._news:
            salt, limit = seq.request.kv_scope, seq.matchable_tokens
            seq.lookup = self._cache.look_up(seq.ids, salt, limit, seq.lookup)
            seq.looked_up_at = self._news
        cached, locked = seq.lookup.cached_pages, seq.lookup.locked_pages
        since_s = seq.overtaken_since_s
        return Newcomer(
            new_pages=self._pages_wanted(seq) - cached,
            unheld_pages=cached - locked,
            shares=2 * locked * self._cache.page_size >= len(seq.ids),
            overtaken=seq.overtaken,
            overtaken_for_s=0.0 if since_s is None else self._clock() - since_s,
        )

    def _pages_wanted(self, seq: Sequence) -> int:
        return -(-(len(seq.ids) + (not seq.single_token)) // self._cache.page_size)

    def growth_pages(self, active: Collection[Sequence]) -> int:
        return self._growth(active).peak

    def _growth(self, active: Collection[Sequence]) -> Growth:
        return Growth(self._growing(active), self._cache.page_size)

    def _growing(self, active: Collection[Sequence]) -> list[Growing]:
        own_pages, growing = self._cache.own_pages, list[Growing]()
        for seq in active:
            if (more_tokens := self._more_tokens(seq)) > 0:
                assert seq.pages is not None
                pages = seq.pages
                growing.append(Growing(len(seq.ids), len(pages.pages), own_pages(pages), more_tokens))
        return growing

    def _newcomer(self, seq: Sequence, waiting: Newcomer) -> Growing:
        return Growing(len(seq.ids), self._pages_wanted(seq), waiting.new_pages, self._more_tokens(seq))

    def _more_tokens(self, seq: Sequence) -> int:
        if seq.single_token:
            return 0
        return self._output_estimate.more_tokens(self._allowed_tokens(seq) - seq.num_output)

    def _allowed_tokens(self, seq: Sequence) -> int:
        context = self._max_context_tokens - len(seq.request.prompt_ids)
        limit = seq.request.sampling.max_tokens
        return context if limit is None else min(limit, context)
