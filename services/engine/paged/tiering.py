"""A core's tiers keep KV below its pool: it reads prefixes from them, and stores what it may evict next.

    ahead   waits for its turn, a tier in files holds some of it --> the kernel is told to read that
    up      admitted, a tier holds more --> FILLING --read, compared, published--> COMPUTING
                                               |----cut, late, corrupt, failed-----^   with the blocks read
            admitted to receive, a tier holds more --> RECEIVING, and its pages are reported only then
    down    free pages run short: all that is cached, in order of eviction, each block after its parent
              --> copied by the tier's thread, while the pages stay evictable (tier_storing.py)

Where ranks share a directory of files, what others keep there is read likewise, and never written. Where its
own tiers lack anything, a sequence waits a moment for a look at what they keep (services/tier/shared.py).

A sequence that fills has its pages, like one that computes; the tier's thread writes those that it shares
with nobody. A sequence that shares a prefix which is being read waits for that read, and then matches the
tree. So there is one read, and nobody waits in a chain.

Where the layout has per-request state, a sequence that computes reads up to the deepest checkpoint that a
tier holds, into units of its own, and goes on from there once all is read. Without the checkpoint, the pages
that were read only need not be stored again. A sequence that receives reads pages alone, because the state at
its prompt's end is written to it.

Rule 1: pages are published only when their bytes have been compared.
Rule 2: whatever happens to a read, the sequence computes the rest: a tier may cost time, but no request.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from queue import Empty, SimpleQueue

from services.engine.paged.carrying import Carrying
from services.engine.paged.sequence import Phase
from services.engine.paged.sequence import Sequence as EngineSequence
from services.engine.paged.tier_finding import NOTHING, Finding, Found
from services.engine.paged.tier_health import TierCounts, TierHealth
from services.engine.paged.tier_storing import Storing
from services.engine.paged.tiered_pool import TieredPool
from services.kv.tiers.block import Block
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import LateTier, SlotKind
from services.kv.tiers.slot_spans import SlotSpan
from services.kv.tiers.write_budget import WriteBudget
from services.tier.copies import (
    Clock,
    Copy,
    CopyPace,
    CopyPiece,
    LoadCopy,
    LoadEnd,
    Look,
    Move,
    ReadAhead,
    Store,
    TierSlots,
)
from services.tier.shared import SharedFiles
from services.tier.thread import TierThread
from services.values.rank_reports import RankLoad

_STOP_S = 2.0
# A sequence that receives waits so long for each of two reads; a prefill rank waits 30 s for a ticket.
_TICKET_WAITS_S = 10.0
# So many of those next in turn are read ahead, and so much: the kernel keeps it in memory that nobody else
# needs, and not for long.
_READ_AHEAD_FOR = 8
_MOST_AHEAD_BYTES = 1 << 30
_LOOK_AGAIN_S = 0.5  # A look at what others keep is as good as new for so long,
_LOOK_SHARE = 20  # or for so many times the time that it took: nearly all of the thread's time is for copies.
_TAKEN_IN = 256  # So many records of a tier that was opened late are taken in at a time.
_LOOK_WAITS_S = 0.05  # Nobody waits longer for a look.


@dataclass(frozen=True, slots=True)
class FillHooks:
    publish: Callable[[EngineSequence], None]
    offer: Callable[[EngineSequence], None]
    catch_up: Callable[[EngineSequence], None]
    report: Callable[[EngineSequence], None]  # Its pages may be written now.
    load: Callable[[], RankLoad]
    reused: Callable[[EngineSequence], None]
    carrying: Carrying
    active: Collection[EngineSequence]  # It changes as sequences get pages and end.


@dataclass(slots=True, eq=False)
class Fill:
    """A sequence waits for a read, its own or another sequence's, or for a look (`behind`)."""

    seq: EngineSequence
    deadline_s: float
    found: Found = NOTHING  # It is what its own read is of.
    load: LoadCopy | None = None
    read_s: float = 0.0  # It is the predicted duration of its own read.
    behind: "Fill | Look | None" = None
    is_over: bool = False

    @property
    def keys(self) -> list[bytes]:
        return [block.key for block in self.found.slots]


class Tiering:
    def __init__(
        self,
        books: TierBooks,
        start: Callable[[Callable[[Copy], None]], TierThread],
        pool: TieredPool,
        room_pages: int,
        clock: Clock,
        wake: Callable[[], None],
        budget: WriteBudget | None = None,
        shared: SharedFiles | None = None,
    ) -> None:
        """`start` begins the thread, which reports each finished copy to the function that `start` was given.

        `wake` is then called from that thread, and is to have `turn` called. Pages are stored once fewer than
        `room_pages` are free. To the thread `shared` is one more tier, behind those of the books.
        """
        self.books = books
        self.counts = TierCounts()
        self._pool = pool
        self._block_tokens, self._block_bytes = pool.block_tokens, pool.slot_bytes
        self._clock = clock
        self._wake = wake
        self._shared = shared
        self._shared_tier = len(books.num_slots)
        self._look: Look | None = None
        self._look_again_s = self._look_by_s = -math.inf
        self._health = TierHealth(self._shared_tier + (shared is not None), self.counts, clock)
        self._finding = Finding(books, pool, self._health, shared, self._shared_tier)
        self._ended: SimpleQueue[Copy | LateTier] = SimpleQueue()
        self._fills: dict[EngineSequence, Fill] = {}
        self._reading: dict[bytes, Fill] = {}
        self._by_load: dict[LoadCopy, Fill] = {}
        self._hooks: FillHooks | None = None
        # The thread hangs. A sequence that waits for a read computes after its deadline.
        self.is_lost = False
        self.thread = start(self._note_ended)
        self.storing = Storing(
            *(books, self.thread, self._health, self.counts, pool, room_pages, clock),
            budget or WriteBudget(),
        )

    def __repr__(self) -> str:
        return f"Tiering({self.books} fills={len(self._fills)})"

    @property
    def shared_files(self) -> str:
        """Return what names the directory whose files it reads; empty where it reads none."""
        return "" if self._shared is None else self._shared.name

    def open_late(self, late: LateTier, slab: TierSlots) -> bool:
        """Use a tier that could not be opened before; return False once tiers are stopped. Any thread may
        call it."""
        if not self.thread.put(late.tier, slab):
            return False
        self._ended.put(late)
        self._wake()
        return True

    def attach(self, hooks: FillHooks) -> None:
        self._hooks = hooks

    def lose(self, is_lost: bool) -> None:
        """Do without the thread, which hangs, or with it again."""
        self.is_lost = is_lost

    @property
    def idle_s(self) -> float | None:
        """Return the seconds until `turn` is due without any finished copy, or None where it is not due."""
        due_s = [fill.deadline_s for fill in self._fills.values()]
        # A former life's blocks are not known yet, or in which order others go.
        if self.books.has_events or self.books.has_late or self.books.is_behind:
            due_s.append(0.0)
        if not self.is_lost and (look_at_s := self.storing.due_s) is not None:
            due_s.append(look_at_s)
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    def enter(self, seq: EngineSequence, *, may_wait: bool = True, counts: bool = True) -> bool:
        """Begin to read what a tier holds beyond the cached prefix of a sequence that computes or receives.

        The sequence has its pages, and nobody else writes them. With `may_wait` it may wait for another read,
        or for a look. With `counts` it is a hit or a miss. Return whether it waits for a read now.
        """
        was_renegotiated = seq.phase is Phase.RECEIVING and seq.prefix_limit is not None
        if self.is_lost or was_renegotiated or not self._begin(seq, self._computed_per_s, may_wait, counts):
            return False
        if seq.phase is Phase.COMPUTING:
            seq.phase = Phase.FILLING
        return True

    @property
    def _in_files(self) -> tuple[bool, ...]:
        return (*self.books.in_files, True)

    @property
    def _computed_per_s(self) -> float:
        assert self._hooks is not None
        return self._hooks.load().prefill_tokens_per_s

    def suffices(self, seq: EngineSequence, held: int, end: int) -> bool:
        """Return whether a sequence that holds `held` tokens need not ask a source that holds `end` of them.

        A source is guessed to write half as fast as a tier reads.
        """
        stored = seq.pages.prefix_len if seq.pages is not None else 0
        found = None if self.is_lost else self._finding.find(seq, held, stored)
        if found is None or not found.slots:
            return False
        depth, left = found.end, self._finding.left(found, self._computed_per_s)
        if not left.is_worth_reading:
            return False
        if left.read_s and left.computed_tokens_per_s:
            return end - depth <= left.read_s * left.computed_tokens_per_s
        return end - depth < self._block_tokens

    def _begin(self, seq: EngineSequence, computed_tokens_per_s: float, may_wait: bool, counts: bool) -> bool:
        now_s = self._clock()
        found = self._finding.find(seq, seq.computed, seq.stored)
        if found is None:
            return False
        if may_wait and found.end < found.wanted_end and self._waits_for_look(seq, now_s):
            return True
        if counts and seq.retractions == 0:
            self.counts.hits += bool(found.slots)
            self.counts.misses += not found.slots
        if not found.slots:
            return False
        if own := [block for block in found.slots if block.place.tier != self._shared_tier]:
            self.books.use(own[-1])
        if may_wait and (other := self._reading.get(found.slots[0].key)) is not None:
            self._fills[seq] = Fill(seq, _deadline_s(seq, now_s, other.deadline_s - now_s), behind=other)
            return True
        if not (found := self._finding.worth_reading(found, computed_tokens_per_s)).slots:
            return False
        left = self._finding.left(found, computed_tokens_per_s)
        waits_s = sum(fill.read_s for fill in self._fills.values())  # Earlier reads come first.
        limit_s = replace(left, read_s=waits_s + left.read_s).limit_s
        if (load := self._begin_read(seq, found, computed_tokens_per_s)) is None:
            return False
        fill = Fill(seq, _deadline_s(seq, now_s, limit_s), found, load, left.read_s)
        self._fills[seq] = self._by_load[load] = fill
        for key in fill.keys:
            self._reading.setdefault(key, fill)
        return True

    def _waits_for_look(self, seq: EngineSequence, now_s: float) -> bool:
        """Begin a look at what others keep, if the last one is old; return whether `seq` waits for it."""
        if self._shared is None or not self._shared.is_open or self._health.is_off(self._shared_tier):
            return False
        if self._look is None:
            look = Look(self._shared, self._shared_tier)
            if now_s < self._look_again_s or not self.thread.submit(look):
                return False
            self._look, self._look_by_s = look, now_s + _LOOK_WAITS_S
        if now_s >= self._look_by_s:  # The disk may never answer.
            return False
        self._fills[seq] = Fill(seq, self._look_by_s, behind=self._look)
        return True

    def _note_look(self, look: Look) -> None:
        self._look, look.is_over = None, True
        self._look_again_s = self._clock() + max(_LOOK_AGAIN_S, _LOOK_SHARE * look.took_s)
        if look.error is not None:
            self._health.note_error(self._shared_tier, str(look.error), reading=True)

    def read_ahead(self, waiting: Iterable[EngineSequence]) -> None:
        """Have what files hold for those next in turn read while they wait, as far as it is worth reading.

        The bytes stay in the kernel's page cache. They take no slot of a nearer tier, so nothing has to be
        written to a file in their place.
        """
        if self.is_lost or not any(self.books.in_files) or not self.thread.may_read_ahead:
            return
        ahead_bytes = 0
        for seq in islice(waiting, _READ_AHEAD_FOR):
            if seq.ahead_bytes is None and ahead_bytes < _MOST_AHEAD_BYTES:
                self._read_ahead(seq, _MOST_AHEAD_BYTES - ahead_bytes)
            ahead_bytes += seq.ahead_bytes or 0

    def _read_ahead(self, seq: EngineSequence, most_bytes: int) -> None:
        cached = seq.lookup.cached_pages * self._pool.cache.page_size if seq.lookup is not None else 0
        deepest = seq.lookup.deepest if seq.lookup is not None else None
        resumes_at = min(cached, self._pool.carried.resumable(deepest, cached))
        found = self._finding.find(seq, resumes_at, cached) or NOTHING
        worth = found.slots if self._finding.left(found, self._computed_per_s).is_worth_reading else ()
        in_files = [block.place for block in worth if self._in_files[block.place.tier]]
        places = in_files[: most_bytes // self._block_bytes]
        if not places or self.thread.submit(ReadAhead(places)):
            seq.ahead_bytes = len(places) * self._block_bytes
            chosen = set(places)
            num_blocks = sum(block.kind is SlotKind.BLOCK for block in worth if block.place in chosen)
            self.counts.tokens_ahead += num_blocks * self._block_tokens

    def leave(self, seq: EngineSequence) -> None:
        if (fill := self._fills.get(seq)) is not None:
            self._end(fill)

    def turn(self) -> bool:
        """Handle finished copies, cut late reads, and begin to store the pages that are evicted next.

        Return True where a sequence that was filling now computes, or reads once more.
        """
        now_s, num_fills = self._clock(), len(self._fills)
        self._take_ended()
        self.books.take_in(_TAKEN_IN)
        self.books.put_in_order()
        waited = [fill for fill in self._fills.values() if self._has_waited(fill, now_s)]
        late = [fill for fill in self._fills.values() if fill.load is not None and now_s >= fill.deadline_s]
        for fill in waited:
            self._go_on(fill)
        for fill in late:
            assert fill.load is not None
            self._note_late(fill.load)
            self._go_on(fill)
        if not self.is_lost:
            self.storing.turn()
        return bool(waited) or len(self._fills) < num_fills

    def _note_late(self, load: LoadCopy) -> None:
        """Blame the tier that the thread is at, which may be another copy's."""
        pieces = load.pieces[load.num_done :][:1]
        tier = pieces[0].place.tier if pieces else None
        if (running := self.thread.running) is not None and running.at_tier is not None:
            tier = running.at_tier
        if tier is not None:
            self._health.note_error(tier, "a read is late", reading=True)

    def _take_ended(self) -> None:
        while (copy := self._next_ended()) is not None:
            match copy:
                case LoadCopy():
                    self._note_load(copy)
                case Store():
                    self.storing.note_store(copy)
                case Move():
                    self.storing.note_move(copy)
                case Look():
                    self._note_look(copy)
                case LateTier():
                    self.books.open_tier(copy)
                case ReadAhead() if copy.error is not None:
                    assert copy.at_tier is not None
                    self._health.note_error(copy.at_tier, str(copy.error), reading=True)

    def _has_waited(self, fill: Fill, now_s: float) -> bool:
        return fill.behind is not None and (fill.behind.is_over or now_s >= fill.deadline_s)

    def _go_on(self, fill: Fill) -> None:
        """Let the sequence compute behind what was read; if it waited for another's, it may read once."""
        assert self._hooks is not None
        self._end(fill)
        seq, before = fill.seq, fill.seq.computed
        was_filling = seq.phase is Phase.FILLING
        is_whole = self._take_read(fill)
        if was_filling:
            seq.phase = Phase.COMPUTING
        self._hooks.publish(seq)
        if fill.found.parts and is_whole:
            self._hooks.carrying.go_on(seq, self._hooks.active)
        elif fill.found.parts:
            self._hooks.carrying.begin_anew(seq, self._hooks.active)
        brought = seq.computed - before if is_whole or not fill.found.parts else 0
        self.counts.tokens_up += brought
        if seq.retractions == 0:  # Otherwise it computed them itself before.
            seq.reused_tokens += seq.computed - before
            seq.brought_tokens += brought
        self._hooks.reused(seq)
        self._hooks.offer(seq)
        if fill.behind is not None:
            self._hooks.catch_up(seq)
            looked = isinstance(fill.behind, Look)  # It was not counted before that.
            self.enter(seq, may_wait=looked and fill.behind.is_over, counts=looked)
        if seq.phase is Phase.RECEIVING and seq not in self._fills:
            self._hooks.report(seq)

    def _take_read(self, fill: Fill) -> bool:
        """Count what was read as the sequence's. Return whether that is all of it."""
        seq, found = fill.seq, fill.found
        done = fill.load.pieces[: fill.load.num_done] if fill.load is not None else ()
        blocks = [piece for piece in done if piece.block.kind is SlotKind.BLOCK]
        if blocks:
            seq.stored = max(seq.stored, (found.first + len(blocks)) * self._block_tokens)
        is_whole = len(done) == len(found.slots)
        if found.parts and is_whole:
            seq.computed = found.end
        elif not found.parts and blocks:
            seq.computed = max(seq.computed, seq.stored)
        for piece in blocks:
            if piece.block.with_draft and self._pool.draft is not None:
                pages = [span.unit for span in piece.spans if span.pool == 0]
                self._pool.draft.received(pages, len(pages) * self._pool.layout.page_size)
        return is_whole

    def _begin_read(self, seq: EngineSequence, found: Found, computed_tokens_per_s: float) -> LoadCopy | None:
        assert self._hooks is not None and seq.carried is not None
        pieces = self._block_pieces(seq, found)
        if found.parts:
            self._hooks.carrying.pull_up_to(seq, found.end)
            spans = self._pool.part_spans(self._pool.carried.units_of(seq.carried))
            pieces += [_piece(part, each) for part, each in zip(found.parts, spans, strict=True)]
            pace = CopyPace(found.saved_tokens, computed_tokens_per_s, is_whole=True)
        else:
            pace = CopyPace(self._block_tokens, computed_tokens_per_s)
        load = LoadCopy(pieces, pace)
        if not self.thread.submit(load):
            if found.parts:
                self._hooks.carrying.begin_anew(seq, self._hooks.active)
            return None
        for block in found.slots:  # This thread notes later that the read has ended.
            if block.place.tier != self._shared_tier:
                self.books.begin_read(block)
        return load

    def _block_pieces(self, seq: EngineSequence, found: Found) -> list[CopyPiece]:
        assert seq.pages is not None
        pieces, per_block = [], self._pool.block_pages
        num_had = max(seq.computed, seq.stored) // self._pool.layout.page_size
        for index, block in enumerate(found.blocks, start=found.first):
            begin = max(num_had, index * per_block)
            pages = seq.pages.pages[begin : (index + 1) * per_block]
            pieces.append(_piece(block, self._pool.block_spans(pages, begin - index * per_block)))
        return pieces

    def _end(self, fill: Fill) -> None:
        if fill.load is not None:
            fill.load.stop()
        fill.is_over = True
        del self._fills[fill.seq]
        for key in fill.keys:
            if self._reading.get(key) is fill:
                del self._reading[key]

    def _note_load(self, load: LoadCopy) -> None:
        is_bad = load.end in (LoadEnd.CORRUPT, LoadEnd.FAILED)
        for index, piece in enumerate(load.pieces):
            is_good = index != load.num_done or not (is_bad or load.end is LoadEnd.GONE)
            if piece.place.tier != self._shared_tier:
                self.books.end_read(piece.block, good=is_good)
            elif index < load.num_done:
                self.counts.tokens_shared += self._block_tokens * (piece.block.kind is SlotKind.BLOCK)
            elif not is_good and self._shared is not None:
                self._shared.forget(piece.block.key, piece.place.slot)
        self.counts.loads[load.end.value] = self.counts.loads.get(load.end.value, 0) + 1
        for tier, num_bytes in load.read_bytes.items():
            self.counts.bytes_up += num_bytes
            is_whole = load.end in (LoadEnd.WHOLE, LoadEnd.SLOW)
            self._health.trust[tier].note_read(num_bytes, load.read_s[tier], is_whole=is_whole)
        if is_bad:
            why = "a digest differs" if load.end is LoadEnd.CORRUPT else str(load.error)
            self._health.note_error(load.pieces[load.num_done].place.tier, why, reading=True)
        fill = self._by_load.pop(load)
        if not fill.is_over:
            self._go_on(fill)

    def stop(self) -> None:
        """Stop touching the pool, and release the slabs to the rank's next process."""
        self.thread.stop(_STOP_S)

    def figures(self) -> TierCounts:
        self.counts.slots = sum(self.books.num_slots)
        self.counts.held = self.books.num_held
        self.counts.is_off = self._is_off
        return self.counts

    @property
    def _is_off(self) -> bool:
        return self.is_lost or any(map(self._health.is_off, range(self._shared_tier)))

    def rated(self, load: RankLoad) -> RankLoad:
        """Return the load with how fast the tiers are read. Any thread may call it."""
        return self._health.rated(load, self.books.in_files, self._is_off)

    def check(self, active: Iterable[EngineSequence]) -> None:
        self.books.check()
        self.storing.check()
        filling = {seq for seq in active if seq.phase is Phase.FILLING}
        waiting = {seq for seq in self._fills if seq.phase is not Phase.RECEIVING}
        assert filling == waiting, f"{filling} fill, {self} has others"
        for fill in self._fills.values():
            assert not fill.is_over, f"{fill.seq} waits for nothing"

    def _note_ended(self, copy: Copy) -> None:  # The tier's thread calls this.
        self._ended.put(copy)
        self._wake()

    def _next_ended(self) -> Copy | LateTier | None:
        try:
            return self._ended.get_nowait()
        except Empty:
            return None


def _piece(block: Block, spans: tuple[SlotSpan, ...]) -> CopyPiece:
    return CopyPiece(block, block.place, block.digest, spans)


def _deadline_s(seq: EngineSequence, now_s: float, limit_s: float) -> float:
    return now_s + (min(limit_s, _TICKET_WAITS_S) if seq.phase is Phase.RECEIVING else limit_s)
