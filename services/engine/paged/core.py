"""The engine core puts queue, batches, pages and radix tree around a model runner, without a thread or clock.

In a step the core admits what fits, builds a batch of chunks, runs it, and accounts for it. It reports all
that happened as events, in order, and the shell hands them on.

When pages run short, three things happen, in this order: the cache evicts unlocked pages
(services/kv/radix_tree.py says which); newcomers wait (gate.py); the sequences that came last are retracted
(sequence.py). The core owns every page through its PrefixCache; `check()` proves that each is in one place.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from services.engine.paged.admitting import Limits
from services.engine.paged.carrying import Carrying
from services.engine.paged.chunks import chunk_of, lacks_slot
from services.engine.paged.core_events import Carried, Failed, Reported, Wanted
from services.engine.paged.core_reports import Reports, StepFigures
from services.engine.paged.draft_chances import DraftCounts
from services.engine.paged.drafters import Drafting, RoomAhead, Wish
from services.engine.paged.fair_share import FairShare, token_cost
from services.engine.paged.gate import BatchSlots, Gate
from services.engine.paged.in_common import InCommon
from services.engine.paged.model_runner import Chunk, ModelRunner, Proposal, Sampled
from services.engine.paged.pulls import PullHooks, Pulls
from services.engine.paged.sequence import (
    RUNNING,
    Phase,
    PromptCharges,
    Sequence,
    check_prompt,
    finish_reason,
    follow_choice,
    newest_token,
)
from services.engine.paged.tiering import FillHooks, Tiering
from services.engine.paged.waiting_queue import ChunkTurns, gives_way, in_turn, retraction_victim, tenant_of
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import Hold, PrefixCache
from services.values.kv import CacheEvents, PageBooks
from services.values.rank_reports import RankLoad


class EngineCore:
    """Only the engine's thread may call its methods."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        limits: Limits,
        clock: Callable[[], float],
        carried: CarriedCache | None = None,
        drafting: Drafting | None = None,
        tiers: Tiering | None = None,
    ) -> None:
        """`carried` is required where the layout has per-request state; its checkpoints belong to `cache`'s
        tree. Without `drafting` each step gives a sequence one token."""
        self.runner = runner
        self.page_size = runner.layout.page_size
        # The pool limits the context too, so that a sequence that is alone always fits.
        self.max_context_tokens = min(runner.max_context_tokens, runner.memory.num_pages * self.page_size)
        self.cache = cache
        self.carried = carried or CarriedCache(runner.layout, ())
        self._carrying = Carrying(self.carried, cache, limits.chunk_size)
        self._drafting = drafting
        self._drafts = DraftCounts()
        self._clock = clock
        self._shares = FairShare()
        self._charges = PromptCharges(self._shares)
        self._chunk_turns = ChunkTurns(self._shares)
        self._gate = Gate(cache, self.max_context_tokens, limits, clock, self._shares)
        self._active: list[Sequence] = []  # These have pages; they are in order of admission.
        self._kept: set[Sequence] = set()  # These have ENDED, but a transfer may still read their pages.
        self._events: list[tuple[Sequence, Reported]] = []
        self.pulls = Pulls(
            *(cache, self.carried, self._carrying, runner.draft, clock, self._active),
            PullHooks(self._publish, self._offer, self._reserve, lambda: self.tiers, self._gate),
        )
        self.figures = StepFigures(limits, clock)
        self._slots = BatchSlots(limits, self.figures.times, clock)
        self._ahead = RoomAhead(self.cache, self._carrying, runner, self.max_context_tokens)
        self._in_common = InCommon(cache, self._carrying.estimate)
        counted = self._gate, self._in_common, self.figures, self._drafts, self.pulls, self._chunk_turns
        self._reports = Reports(cache, self.carried, *counted)
        self.tiers = tiers
        if tiers is not None:
            fills = (self._publish, self._offer, self._catch_up, self._reserve, self.load)
            tiers.attach(FillHooks(*fills, self._charges.reused, self._carrying, self._active))
        self.retractions = 0

    # -- commands ---------------------------------------------------------------------------------

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            InvalidRequest: the prompt is empty, or an id is outside the vocabulary.
            NoCapacity: the context or the pool can never hold it.
        """
        check_prompt(seq, self.runner.vocab_size, self.max_context_tokens)
        seq.submitted_s = self._clock()
        self._in_common.came(seq)
        self._chunk_turns.came(seq)
        seq.place = self._shares.came(seq.request.share)
        self._wait(seq)

    def landed(self, seq: Sequence, first_token: Sampled, *, draft_end: int = 0) -> None:
        """Note that a RECEIVING sequence's first token is known and its pages are written, up to `draft_end`
        those in the draft model's pool, too."""
        if seq.phase is not Phase.RECEIVING:
            return  # It has been cancelled since.
        self.pulls.note_draft(seq, draft_end)
        seq.computed = len(seq.ids)
        self._publish(seq)
        self._carrying.note_border(seq)
        seq.phase, seq.first_token = Phase.LANDED, first_token
        self._let_in_landed()

    def renegotiate(self, seq: Sequence, start: int) -> None:
        """Queue a RECEIVING sequence, whose pages nobody writes, again with a shorter prefix: its delta is to
        start earlier, at `start`, and the pages of a prefix are never written."""
        if seq.phase is not Phase.RECEIVING:
            return  # It has been cancelled since.
        self._active.remove(seq)
        self._release(seq)
        seq.receives, seq.prefix_limit = True, start
        self._wait(seq)

    def cancel(self, seq: Sequence, *, quarantine: bool = False) -> None:
        """End a sequence, whatever its phase. With `quarantine` somebody may still write its pages: they are
        reused only after `end_quarantine`."""
        if seq.phase in (Phase.NEW, Phase.ENDED):
            return
        if self.tiers is not None:
            self.tiers.leave(seq)
        (self._gate if seq.phase is Phase.WAITING else self._active).remove(seq)
        self._end(seq, quarantine=quarantine)

    def end_quarantine(self, seq: Sequence) -> None:
        if seq.pages is not None and seq.pages.hold is Hold.QUARANTINED:
            self.cache.end_quarantine(seq.pages)
            if seq.carried is not None:
                self.carried.end_quarantine(seq.carried)
            seq.pages = seq.carried = None
            self._gate.note_news()

    def transfer_ended(self, seq: Sequence) -> None:
        seq.transfer_open = False
        if seq in self._kept:
            self._kept.remove(seq)
            self._release(seq)

    def change_role(self, limits: Limits, drafting: Drafting | None) -> None:
        self._slots.limits = self.figures.limits = limits
        self._drafting = drafting

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit sequences, run one batch and account for it; `take_outputs` returns what happened. Return
        False where nothing changed, and nothing will change until the next command.

        Raises:
            RunnerFailed: the batch was not computed; the caller must call `fail_active`.
        """
        retractions, filled = self.retractions, self.tiers is not None and self.tiers.turn()
        admitted = filled | self._let_in_landed() | self._admit()
        if self.tiers is not None:
            self.tiers.read_ahead(self._gate)
        batch = self._decode_chunks()
        num_decoding, num_drafts = len(batch), sum([chunk.num_drafts for _, chunk in batch])
        batch += self._prompt_chunks(num_decoding, num_drafts)
        if not batch:
            return admitted or self.retractions > retractions
        began = self._clock()
        for seq, _ in batch[num_decoding:]:
            seq.timer.computes(began)
        with self.figures.noting_failures():
            sampled = self.runner.run([chunk for _, chunk in batch])
        prompt_tokens = sum(len(chunk.token_ids) for _, chunk in batch[num_decoding:])
        self.figures.note(num_decoding, num_drafts, prompt_tokens, self._clock() - began)
        self._drafts.note_step(num_decoding, sum(map(len, sampled[:num_decoding])))
        for (seq, chunk), token in zip(batch, sampled, strict=True):
            self._account(seq, chunk, token)
        return True

    def take_outputs(self) -> list[tuple[Sequence, Reported]]:
        events, self._events = self._events, []
        return events

    def fail_active(self) -> list[Sequence]:
        """End every computing sequence, because the runner failed and their KV cannot be trusted."""
        failed = [s for s in self._active if s.phase in RUNNING]
        for seq in failed:
            assert seq.carried is not None
            self.carried.trim(seq.carried, seq.computed)  # Its transfer may stay open.
            self.cancel(seq)
        return failed

    # -- reports ----------------------------------------------------------------------------------

    def load(self) -> RankLoad:
        return self._reports.load(self._active, len(self._kept), self.retractions)

    def take_cache_events(self) -> CacheEvents:
        return self._reports.take_cache_events()

    def check(self) -> PageBooks:
        """Raise AssertionError where the books do not balance, or where pages are held by no sequence."""
        if self.tiers is not None:
            self.tiers.check(self._active)
        return self._reports.check(num_holders=len(self._active) + len(self._kept))

    # -- admission --------------------------------------------------------------------------------

    def _wait(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        seq.timer.counts_from(self.figures.prompt_tokens)
        self._gate.add(seq)

    def _let_in_landed(self) -> bool:
        landed = [seq for seq in self._active if seq.phase is Phase.LANDED]
        if not landed:
            return False
        running = Counter(tenant_of(seq) for seq in self._active if seq.phase in RUNNING)
        for seq in in_turn(landed, running):
            if not (self._slots.one_more_runs(self._active) or self._makes_place(seq)):
                break
            self._report_first_token(seq)
        return any(seq.phase is not Phase.LANDED for seq in landed)

    def _makes_place(self, seq: Sequence) -> bool:
        """Send another sequence back so that `seq` can run: it has landed, but another tenant took its slot.
        Nobody is sent back where more run than are allowed now, since that would leave no slot free."""
        victim = gives_way(seq, [s for s in self._active if s.phase in RUNNING], self._shares)
        if victim is None or not self._slots.one_more_runs([s for s in self._active if s is not victim]):
            return False
        self._send_back(victim)
        return True

    def _report_first_token(self, seq: Sequence) -> None:
        first_token, seq.first_token = seq.first_token, None
        assert first_token is not None
        self._append(seq, first_token)

    def _admit(self) -> bool:
        changed = self.pulls.refill()
        if self.pulls.lacking:
            return changed  # The sequences that lack pages get the next ones.
        changed |= self._let_in()
        while (exchange := self._gate.exchange(self._active, self._has_place)) is not None:
            comes, leaves = exchange
            self._send_back(leaves)
            changed = True
            if not self._gate.reserve(comes, self._active):
                break
            self._enter(comes)
        return changed

    def _has_place(self, seq: Sequence, others: list[Sequence]) -> bool:
        has_place = seq.receives or self._slots.one_more_runs(others)
        return has_place and self.carried.may_open(computes=not seq.receives)

    def _let_in(self) -> bool:
        admitted = False
        while self._gate and self._slots.one_more_runs(self._active):
            seq = self._gate.next(
                self._active,
                may_receive=self.carried.may_open(computes=False)
                and self._slots.one_more_receives(self._active),
                may_compute=self.carried.may_open(computes=True),
            )
            if seq is None:
                break
            if self.tiers is None and (late := self._gate.too_late(seq, self.figures.times)):
                self.cancel(seq)
                self._emit(seq, Failed(late))
                admitted = True
            elif self._gate.reserve(seq, self._active):
                self._enter(seq)
                admitted = True
        return admitted

    def _enter(self, seq: Sequence) -> None:
        seq.phase = Phase.RECEIVING if seq.receives else Phase.COMPUTING
        self._active.append(seq)
        if (wanted := self.pulls.begin(seq)) is None:
            self._carrying.begin(seq, self._active)
        fills = wanted is None and self.tiers is not None and not seq.awaits and self.tiers.enter(seq)
        if seq.admitted_s is None or seq.receives:
            seq.admitted_s = self._clock() if seq.admitted_s is None else seq.admitted_s
            seq.reused_tokens = seq.computed
            self._reserve(seq, wanted, fills)
        seq.started_at = self._shares.had(tenant_of(seq))
        self._charges.let_in(seq)
        self._offer(seq)
        seq.receives = False  # After a retraction it computes the tail here.

    def _reserve(self, seq: Sequence, wanted: Wanted | None = None, fills: bool = False) -> None:
        self._emit(seq, self._carrying.reserved(seq, wanted, fills))

    # -- the batch --------------------------------------------------------------------------------

    def _decode_chunks(self) -> list[tuple[Sequence, Chunk]]:
        decoding = self._grown([s for s in self._active if s.phase is Phase.DECODING])
        if self._drafting is None:
            if self.carried.is_empty:
                return [(seq, chunk_of(seq, 1, self.page_size)) for seq in decoding]
            return [(seq, self._ahead.chunk_of(seq, None)) for seq in decoding]
        proposals = self._propose(self._drafting, decoding)
        return [(seq, self._ahead.chunk_of(seq, each)) for seq, each in zip(decoding, proposals, strict=True)]

    def _grown(self, decoding: list[Sequence]) -> list[Sequence]:
        lacking = [seq for seq in decoding if lacks_slot(seq, self.page_size)]
        if not lacking:
            return decoding
        self.cache.make_room(len(lacking))
        # Growing may retract sequences, earlier ones too, so the batch is built afterwards.
        stuck = {seq for seq in lacking if seq.phase is Phase.DECODING and not self._grow(seq)}
        return [seq for seq in decoding if seq.phase is Phase.DECODING and seq not in stuck]

    def _propose(self, drafting: Drafting, decoding: list[Sequence]) -> SequenceOf[Proposal | None]:
        wishes = [Wish(seq, self._ahead.most_drafts(seq)) for seq in decoding]
        with self.figures.drafting():  # A draft model may compute here.
            return drafting.propose(wishes, self.runner.max_step_drafts, self.figures.times)

    def _prompt_chunks(self, num_decoding: int, num_drafts: int) -> list[tuple[Sequence, Chunk]]:
        """Serve the tenants in turn: one with priority waits for no prompt of the others, and each tenant
        waits for at most one step's worth of another's prompts."""
        computing = [seq for seq in self._active if seq.phase is Phase.COMPUTING]
        if not computing:
            self._shares.serves(None)
            return []
        budget, one_ends = self.figures.chunk_tokens(num_decoding, num_drafts), False
        chunks: list[tuple[Sequence, Chunk]] = []
        for seq in self._chunk_turns.line(computing, self.figures.limits.shorter_first):
            if budget <= 0:
                break
            self._catch_up(seq)
            computed = (self._carrying.computes_for(other, seq) for other, _ in chunks)
            if self.pulls.bring(seq) or self._in_common.awaits(seq) or any(computed):
                continue  # It can reuse those tokens at a later step.
            left, withheld = len(seq.ids) - seq.computed, seq.withheld_tokens
            room = self.figures.limits.prompt_room(budget, left, withheld, beside_last=one_ends)
            seq.withheld_tokens += budget - room
            end = self._carrying.prompt_end(seq, room, is_first=not chunks)
            if (size := end - seq.computed) > 0:
                budget, one_ends = budget - size, one_ends or end == len(seq.ids)
                chunks.append((seq, chunk_of(seq, size, self.page_size)))
        return chunks

    def _catch_up(self, seq: Sequence) -> None:
        assert seq.pages is not None
        num_private = seq.pages.num_private
        self.cache.adopt(seq.pages, seq.ids, seq.matchable_tokens)
        if seq.pages.num_private < num_private:
            self._gate.note_news()
        before = seq.computed
        self._carrying.catch_up(seq)
        if seq.retractions == 0:  # Otherwise it computed them itself before.
            seq.reused_tokens += seq.computed - before
        self._charges.reused(seq)
        self._offer(seq)

    def _grow(self, seq: Sequence) -> bool:
        while lacks_slot(seq, self.page_size):
            assert seq.pages is not None
            if self.cache.extend(seq.pages, 1):
                return True
            if (victim := retraction_victim(self._active)) is None:
                return False  # The other pages are being received into, or are in quarantine.
            self._retract(victim)
            if victim is seq:
                return False
        return True

    def _retract(self, seq: Sequence) -> None:
        if self._send_back(seq):
            self.retractions += 1
            self._gate.note_retraction()

    def _send_back(self, seq: Sequence) -> bool:
        """Give the sequence's pages back, with the full ones cached, and queue it again. It returns False
        where the sequence has ended, because its first token was its only one."""
        if seq.phase is Phase.LANDED:
            self._report_first_token(seq)
        if seq.phase is Phase.ENDED:
            return False
        self._publish(seq)
        self._active.remove(seq)
        self._release(seq)
        self._in_common.came(seq)
        seq.retractions += 1
        self._wait(seq)
        return True

    # -- afterwards -------------------------------------------------------------------------------

    def _account(self, seq: Sequence, chunk: Chunk, sampled: tuple[Sampled, ...]) -> None:
        accepted = max(0, len(sampled) - 1)
        for right in sampled[:accepted] if accepted else ():
            self._append(seq, right)  # It ends nothing, because usable_drafts has left such drafts out.
            if seq.phase is Phase.ENDED:  # It may have ended because its constraint reached a limit.
                return
        if seq.proposal is not None:
            assert self._drafting is not None
            self._drafting.note(seq, seq.proposal, accepted)
            self._drafts.note(seq.proposal.source, chunk.num_drafts, accepted)
            seq.proposal = None
        seq.computed = chunk.start + len(chunk.token_ids) - chunk.num_drafts + accepted
        self._charges.computed(seq)
        self._publish(seq)
        if not self.carried.is_empty:
            self._carrying.account(seq)
        self._offer(seq)
        if sampled:
            self._append(seq, sampled[-1], chunk.num_drafts, accepted)
        if chunk.num_drafts > accepted and seq.phase is Phase.DECODING:
            self._ahead.give_back(seq)

    def _publish(self, seq: Sequence) -> None:
        assert seq.pages is not None
        # Only full pages go to the tree; nothing is published while the last page is filling.
        if (end := max(seq.computed, seq.stored)) // self.page_size > seq.pages.num_published:
            # With a duplicate kept, a sequence that needs the whole pool could lack one page. It is kept only
            # for a transfer, which may be reading the sequence's own page.
            self.cache.publish(seq.pages, seq.ids[:end], keep_duplicates=seq.transfer_id is not None)
            if seq.phase is not Phase.DECODING:
                self._gate.note_news()

    def _offer(self, seq: Sequence) -> None:
        """Offer the transfer every page that is final: the full ones and, at the end of the prompt, the last
        page and the per-request state."""
        if seq.transfer_id is None or not seq.transfer_open:
            return
        assert seq.pages is not None and seq.carried is not None
        whole = seq.computed == len(seq.ids)
        end = seq.computed if whole else max(seq.computed, seq.stored) // self.page_size * self.page_size
        if end > seq.offered:
            self._emit(seq, self.pulls.offer(seq, seq.transfer_id, end))
            if whole and not self.carried.is_empty:
                self._emit(seq, Carried(seq.transfer_id, self.carried.units_of(seq.carried)))

    def _append(self, seq: Sequence, sampled: Sampled, drafted: int = 0, accepted: int = 0) -> None:
        if (refused := follow_choice(seq, sampled.token_id)) is not None:
            self._finish(seq)
            self._emit(seq, Failed(refused))
            return
        first = seq.phase is not Phase.DECODING
        seq.ids.append(sampled.token_id)
        if (share := seq.request.share) is not None:
            self._shares.charge(share, token_cost(len(seq.ids)))
        seq.phase = Phase.DECODING
        finished = finish_reason(seq, self.max_context_tokens)
        if not (first or drafted) and finished is None and sampled.logprobs is None:
            self._emit(seq, sampled.token_id)
            return
        self._in_common.left(seq)
        times = (self._clock(), self.figures.prompt_tokens) if first else None
        token = newest_token(seq, sampled, finished, (drafted, accepted), times)
        self._emit(seq, self.pulls.with_draft(seq, token) if seq.transfer_id is not None else token)
        if finished is not None:
            self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        self._active.remove(seq)
        self._gate.note_end(seq)
        self._end(seq)

    def _end(self, seq: Sequence, *, quarantine: bool = False) -> None:
        seq.phase, seq.proposal = Phase.ENDED, None
        self._in_common.left(seq)
        self._charges.ended(seq)
        self._shares.left(seq.request.share)
        if self._drafting is not None:
            self._drafting.ended(seq)
        if seq.pages is None:
            return
        self._gate.note_news()  # Its slot in the batch is free, even where its pages are not.
        if quarantine:
            self.cache.quarantine(seq.pages)
            if seq.carried is not None:
                self.carried.quarantine(seq.carried)
        elif seq.transfer_open:
            self._carrying.rest(seq)
            self._kept.add(seq)
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        assert seq.pages is not None
        self._carrying.release(seq)
        self.cache.close(seq.pages)
        seq.pages = None
        self._gate.note_news()

    def _emit(self, seq: Sequence, event: Reported) -> None:
        self._events.append((seq, event))
