"""A core's pulls have two sides: sources write prefixes into pages here, and other ranks read pages of ours.

    here    WAITING --admitted, a source holds more--> PULLING --landed--------------------> COMPUTING, or
                                                          |----failed----------------------------^ FILLING
                                                          `----failed, set aside--> lacks pages--'
    here    NEW --taken over (take_overs.py)--> PULLING --landed, failed--> ENDED
    holder  grant(id, ids): the longest match, or the deepest checkpoint on it, locked --> Granted
            --> a transfer reads it --> grant_ended(id): unlocked

Rule 1: a grant allocates nothing and waits for nothing. So two ranks that pull from each other never wait for
        each other.
Rule 2: what is granted is locked from the match until the transfer has ended.
Rule 3: pages are published only when they have landed, and never while a source may write them. Pages that
        it may still write wait in quarantine, and the sequence gets others.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from services.engine.paged import sequence
from services.engine.paged.carrying import Carrying
from services.engine.paged.core_events import Offered, Token, Wanted
from services.engine.paged.gate import Gate
from services.engine.paged.model_runner import DraftModel
from services.engine.paged.sequence import Phase
from services.engine.paged.take_overs import TakeOvers
from services.engine.paged.tiering import Tiering
from services.kv.carried_cache import CarriedCache, SequenceCarried
from services.kv.prefix_cache import PrefixCache, SequencePages
from services.values.kv import PageId
from services.values.rank import TransferId

# The first grant may be of any size. Locked pages cannot be evicted for the sequences that run here, so the
# others come to this share of the pool, or to more where half of the pool is available beside them.
_MOST_SHARE = 8
_MOST_GRANTS = 8


@dataclass(frozen=True, slots=True)
class Granted:
    end: int  # It is in tokens.
    pages: tuple[PageId, ...]  # These are pages of full attention, from position 0 on.
    carried: tuple[tuple[PageId, ...], ...]  # The units are listed by group, as in core_events.Carried.
    with_draft: bool


@dataclass(frozen=True, slots=True)
class Refused:
    word: str  # It is one of the words in common.proto.
    held_tokens: int


@dataclass(frozen=True, slots=True)
class PullHooks:
    publish: Callable[[sequence.Sequence], None]
    offer: Callable[[sequence.Sequence], None]
    # It reports the sequence's pages, and what it waits for, as Reserved.
    report: Callable[[sequence.Sequence, Wanted | None], None]
    tiers: Callable[[], Tiering | None]
    gate: Gate


class Pulls:
    def __init__(
        self,
        cache: PrefixCache,
        carried: CarriedCache,
        carrying: Carrying,
        draft: DraftModel | None,
        clock: Callable[[], float],
        active: Collection[sequence.Sequence],
        hooks: PullHooks,
    ) -> None:
        self._cache = cache
        self._carried = carried
        self._carrying = carrying
        self._draft = draft
        self._active = active  # It changes as sequences get pages and end.
        self._hooks = hooks
        self._granted: dict[TransferId, tuple[SequencePages, SequenceCarried]] = {}
        self.taking = TakeOvers(cache, carried, carrying, hooks.gate, clock, active)
        # A source may still write these.
        self._aside: dict[TransferId, tuple[SequencePages, SequenceCarried]] = {}
        self._lacking: list[sequence.Sequence] = []

    def __repr__(self) -> str:
        return f"Pulls(grants={len(self._granted)} pages={self.granted_pages} aside={len(self._aside)})"

    # -- what others may read -----------------------------------------------------------------------

    @property
    def num_holders(self) -> int:
        return len(self._granted) + len(self.taking)

    @property
    def granted_pages(self) -> int:
        return sum(len(pages.pages) for pages, _ in self._granted.values())

    def grant(
        self, transfer_id: TransferId, ids: Sequence[int], salt: str, least_end: int
    ) -> Granted | Refused | None:
        """Lock the whole pages of `ids` that are here; return None if the transfer has its grant already."""
        if transfer_id in self._granted:
            return None
        found = self._cache.look_up(ids, salt)
        held = self._carried.resumable(found.deepest, found.cached_pages * self._cache.page_size)
        if held < max(1, least_end):
            return Refused("evicted", held)
        if self._is_busy(held // self._cache.page_size):
            return Refused("busy", held)
        # No request here asked for the prefix again, so it is not protected.
        pages = self._cache.open(ids, salt, held, protect=False)
        carried = self._carried.grant(pages.node, held)
        if carried is None:
            self._cache.close(pages)
            return Refused("busy", held)
        self._granted[transfer_id] = pages, carried
        with_draft = self._draft is not None and self._draft.held_tokens(pages.pages) >= held
        return Granted(held, tuple(pages.pages), self._carried.units_of(carried), with_draft)

    def grant_ended(self, transfer_id: TransferId) -> None:
        if (held := self._granted.pop(transfer_id, None)) is None:
            return
        self._cache.close(held[0])
        self._carried.close(held[1])
        self._hooks.gate.note_news()

    def _is_busy(self, num_pages: int) -> bool:
        if not self._granted:
            return False
        if len(self._granted) >= _MOST_GRANTS:
            return True
        is_much = self.granted_pages + num_pages > self._cache.num_pages // _MOST_SHARE
        return is_much and self._cache.available_pages - num_pages < self._cache.num_pages // 2

    # -- what is written here -------------------------------------------------------------------------

    def begin(self, seq: sequence.Sequence) -> Wanted | None:
        source, seq.source, seq.awaits = seq.source, None, None
        if source is None or seq.receives or seq.retractions:
            return None
        assert seq.pages is not None and seq.matchable_tokens is not None
        unit = self._cache.page_size if self._carried.is_empty else self._carried.index_block
        end = seq.matchable_tokens // unit * unit
        expected_end = min(source.tokens // unit * unit, end)
        resumes_at = self._carried.resumable(seq.pages.node, seq.pages.prefix_len)
        if expected_end <= resumes_at:
            return None
        if (tiers := self._hooks.tiers()) is not None and tiers.suffices(seq, resumes_at, expected_end):
            return None
        seq.awaits = self._who_pulls(seq, expected_end)
        if seq.awaits is not None:
            return None
        seq.phase, seq.pulls_to = Phase.PULLING, expected_end
        self._carrying.begin_to_pull(seq, expected_end, resumes_at)
        return Wanted(end, expected_end, resumes_at)

    def _who_pulls(self, seq: sequence.Sequence, end: int) -> sequence.Sequence | None:
        salt = seq.request.kv_scope
        pulling = (other for other in self._active if other.phase is Phase.PULLING and other.pulls_to >= end)
        alike = (other for other in pulling if other.request.kv_scope == salt)
        return next((other for other in alike if other.ids[:end] == seq.ids[:end]), None)

    def bring(self, seq: sequence.Sequence) -> bool:
        """Return whether another sequence is still pulling what this one would compute, or the tier that is
        read instead."""
        if (other := seq.awaits) is None:
            return False
        if other.phase is Phase.PULLING and not other.lacking_pages:
            return True
        seq.awaits = None
        return self._fill(seq)

    def up_to(self, seq: sequence.Sequence, end: int) -> None:
        """Reserve units for the state at `end` instead; no ticket for the old units has been sent."""
        if seq.phase is Phase.PULLING:
            self._carrying.pull_up_to(seq, end)
            self._hooks.report(seq, None)

    def landed(self, seq: sequence.Sequence, end: int, *, with_draft: bool) -> None:
        """Note that a source has written what the sequence lacked before `end`, and writes no more."""
        if seq.phase is not Phase.PULLING:
            return  # It has been cancelled since.
        if with_draft:
            self.note_draft(seq, end)
        seq.reused_tokens += end - seq.computed
        seq.computed, seq.stored = end, max(seq.stored, end)
        self._hooks.publish(seq)
        if seq.only_pulls:
            self.taking.landed(seq)
            return
        self._carrying.go_on(seq, self._active)
        self._compute(seq)

    def failed(self, seq: sequence.Sequence) -> None:
        """Note that no source writes the sequence's pages any more, apart from those that were set aside."""
        if seq.only_pulls:
            self.taking.end(seq)
        elif seq.phase is Phase.PULLING and not seq.lacking_pages:
            self._carrying.begin_anew(seq, self._active)
            seq.reused_tokens = seq.computed
            self._compute(seq)

    def _compute(self, seq: sequence.Sequence) -> None:
        seq.phase = Phase.COMPUTING
        self._hooks.offer(seq)
        self._fill(seq)

    def _fill(self, seq: sequence.Sequence) -> bool:
        """Read what a tier holds beyond what a source has written; the limits of the two add up."""
        tiers = self._hooks.tiers()
        return tiers is not None and tiers.enter(seq)

    def note_draft(self, seq: sequence.Sequence, end: int) -> None:
        """Note that the draft model's KV was written, too, up to `end`."""
        if end > seq.stored:
            assert seq.pages is not None and self._draft is not None
            page_size = self._cache.page_size
            pages = seq.pages.pages[seq.stored // page_size : -(-end // page_size)]
            self._draft.received(pages, end - seq.stored)

    def offer(self, seq: sequence.Sequence, transfer_id: TransferId, end: int) -> Offered:
        """Offer the pages up to `end`, which may be sent at once; what they lack of the draft model's KV
        comes too late, if it is computed after all."""
        assert seq.pages is not None
        first, last = seq.offered // self._cache.page_size, -(-end // self._cache.page_size)
        held = end if self._draft is None else self._draft.held_tokens(seq.pages.pages[:last])
        if held < end:
            seq.draft_sent = min(seq.draft_sent, held)
        start, seq.offered = seq.offered, end
        return Offered(transfer_id, start, end, tuple(seq.pages.pages[first:last]))

    def with_draft(self, seq: sequence.Sequence, first_token: Token) -> Token:
        """Return the token that follows a prompt with how much of the draft model's KV was sent."""
        if self._draft is None or seq.pages is None:
            return first_token
        return replace(first_token, draft_tokens=min(seq.draft_sent, seq.computed))

    # -- what may be written still --------------------------------------------------------------------

    def set_aside(self, seq: sequence.Sequence, transfer_id: TransferId, end: int) -> None:
        """Keep pages up to `end`, and units, from reuse: a source may still write them for this transfer.

        The sequence, which is PULLING, gets other pages before any new one is admitted.
        """
        assert seq.pages is not None and seq.carried is not None
        num_pages, kept = len(seq.pages.pages), seq.pages.num_published
        self._cache.shorten(seq.pages, max(kept, end // self._cache.page_size))
        self._carried.quarantine(seq.carried)
        self._aside[transfer_id] = self._cache.set_aside(seq.pages, kept), seq.carried
        seq.carried, seq.lacking_pages = self._carried.hold_nothing(), num_pages - kept
        if seq.only_pulls:
            self.taking.end(seq)
        else:
            self._lacking.append(seq)
        self._hooks.gate.note_news()

    def end_aside(self, transfer_id: TransferId) -> None:
        pages, carried = self._aside.pop(transfer_id)
        self._cache.end_quarantine(pages)
        self._carried.end_quarantine(carried)
        self._hooks.gate.note_news()

    @property
    def lacking(self) -> list[sequence.Sequence]:
        if self._lacking:  # Every step reads this property, so an empty list is returned at once.
            self._lacking = [seq for seq in self._lacking if seq.lacking_pages and seq.phase is Phase.PULLING]
        return self._lacking

    def refill(self) -> bool:
        """Give sequences that lack pages others, as far as there are any, and let them compute.

        Return True where one got its pages.
        """
        refilled = False
        for seq in self.lacking:
            assert seq.pages is not None
            may_go_on = self._carried.may_open(computes=True)
            if not (may_go_on and self._cache.extend(seq.pages, seq.lacking_pages)):
                break
            seq.lacking_pages, refilled = 0, True
            self.failed(seq)
        return refilled
