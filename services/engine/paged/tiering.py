"""A core's tiers keep KV below its pool: it reads prefixes from them, and stores what it may evict next.

    ahead   waits for its turn, a tier in files holds some of it --> the kernel is told to read that
    up      admitted, a tier holds more --> FILLING --read, compared, published--> COMPUTING
                                               |----cut, late, corrupt, failed-----^   with the blocks read
            admitted to receive, a tier holds more --> RECEIVING, and its pages are reported only then
    down    free pages run short: all that is cached, in order of eviction, each block after its parent
              --> copied by the tier's thread, while the pages stay evictable (storing.py)

Where ranks share a directory of files, what others keep there is read likewise, and never written. Where its
own tiers lack anything, a sequence waits a moment for a look at what they keep (services/tier/shared.py).

A sequence that fills has its pages, like one that computes; the tier's thread writes those that it shares
with nobody. A sequence that shares a prefix which is being read waits for that read, and then matches the
tree. So there is one read, and nobody waits in a chain.

Rule 1: pages are published only when their bytes have been compared.
Rule 2: whatever happens to a read, the sequence computes the rest: a tier may cost time, but no request.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from queue import Empty, SimpleQueue

from services.engine.paged.sequence import Phase
from services.engine.paged.sequence import Sequence as EngineSequence
from services.engine.paged.storing import Storing, TierCounts, TierHealth
from services.kv.prefix_cache import PrefixCache
from services.kv.tiers.books import Block, Place, SlotState, TierBooks
from services.kv.tiers.tier_keys import keys_of, scope
from services.kv.tiers.wait_or_cut import Left
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
)
from services.tier.shared import SharedFiles
from services.tier.thread import TierThread
from services.values.kv import KvLayout
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
_LOOK_WAITS_S = 0.05  # Nobody waits longer for a look.


@dataclass(frozen=True, slots=True)
class FillHooks:
    publish: Callable[[EngineSequence], None]
    offer: Callable[[EngineSequence], None]
    catch_up: Callable[[EngineSequence], None]
    report: Callable[[EngineSequence], None]  # Its pages may be written now.
    load: Callable[[], RankLoad]


@dataclass(slots=True, eq=False)
class Fill:
    """A sequence waits for a read, its own or another sequence's, or for a look (`behind`)."""

    seq: EngineSequence
    deadline_s: float
    keys: Sequence[bytes] = ()  # These are the blocks of its own read.
    load: LoadCopy | None = None
    first_block: int = 0
    read_s: float = 0.0  # It is the predicted duration of its own read.
    behind: "Fill | Look | None" = None
    is_over: bool = False


class Tiering:
    def __init__(
        self,
        books: TierBooks,
        start: Callable[[Callable[[Copy], None]], TierThread],
        cache: PrefixCache,
        layout: KvLayout,
        block_tokens: int,
        num_slots: Sequence[int],
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
        self._cache = cache
        self._layout = layout
        self._block_tokens = block_tokens
        self._block_pages = block_tokens // layout.page_size
        self._block_bytes = self._block_pages * layout.page_bytes
        self._num_slots = tuple(num_slots)
        self._clock = clock
        self._wake = wake
        self._shared = shared
        self._shared_tier = len(self._num_slots)
        self._look: Look | None = None
        self._look_again_s = -math.inf
        self._health = TierHealth(self._shared_tier + (shared is not None), self.counts, clock)
        self._ended: SimpleQueue[Copy] = SimpleQueue()
        self._fills: dict[EngineSequence, Fill] = {}
        self._reading: dict[bytes, Fill] = {}
        self._by_load: dict[LoadCopy, Fill] = {}
        self._hooks: FillHooks | None = None
        # The thread hangs. A sequence that waits for a read computes after its deadline.
        self.is_lost = False
        self.thread = start(self._note_ended)
        self.storing = Storing(
            *(books, self.thread, self._health, self.counts, cache, layout, block_tokens),
            *(num_slots, room_pages, clock, budget or WriteBudget()),
        )

    def __repr__(self) -> str:
        return f"Tiering({self.books} fills={len(self._fills)})"

    def attach(self, hooks: FillHooks) -> None:
        self._hooks = hooks

    @property
    def idle_s(self) -> float | None:
        """Return the seconds until `turn` is due without any finished copy, or None where it is not due."""
        due_s = [fill.deadline_s for fill in self._fills.values()]
        if self.books.has_events:  # A former life has left something, and nobody knows of it yet.
            due_s.append(0.0)
        if not self.is_lost and (look_at_s := self.storing.due_s) is not None:
            due_s.append(look_at_s)
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    def enter(self, seq: EngineSequence, *, may_wait: bool = True) -> bool:
        """Begin to read what a tier holds beyond the cached prefix of a sequence that computes or receives.

        The sequence has its pages, and nobody else writes them. With `may_wait` it may wait for another read.
        Return whether it waits for a read now.
        """
        was_renegotiated = seq.phase is Phase.RECEIVING and seq.prefix_limit is not None
        if self.is_lost or was_renegotiated or not self._begin(seq, self._computed_per_s, may_wait):
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
        blocks = [] if self.is_lost else self._trusted(self._find(self._wanted(seq)))
        depth = len(blocks) * self._block_tokens
        left = self._left(blocks[held // self._block_tokens :], self._computed_per_s)
        if depth <= held or not left.is_worth_reading:
            return False
        if left.read_s and left.computed_tokens_per_s:
            return end - depth <= left.read_s * left.computed_tokens_per_s
        return end - depth < self._block_tokens

    def _begin(self, seq: EngineSequence, computed_tokens_per_s: float, may_wait: bool) -> bool:
        now_s = self._clock()
        first, keys = seq.computed // self._block_tokens, self._wanted(seq)
        if len(keys) <= first:
            return False
        blocks = self._trusted(self._find(keys)[first:])
        if may_wait and first + len(blocks) < len(keys) and self._waits_for_look(seq, now_s):
            return True
        self._count_look_up(seq, bool(blocks), may_wait)
        if not blocks:
            return False
        if own := [block for block in blocks if block.place.tier != self._shared_tier]:
            self.books.use(own[-1])
        if may_wait and (other := self._reading.get(blocks[0].key)) is not None:
            self._fills[seq] = Fill(seq, _deadline_s(seq, now_s, other.deadline_s - now_s), behind=other)
            return True
        if not (blocks := self._worth_reading(blocks, computed_tokens_per_s)):
            return False
        left = self._left(blocks, computed_tokens_per_s)
        load = LoadCopy(self._pieces(seq, blocks, first), CopyPace(self._block_tokens, computed_tokens_per_s))
        waits_s = sum(fill.read_s for fill in self._fills.values())  # Earlier reads come first.
        limit_s = replace(left, read_s=waits_s + left.read_s).limit_s
        deadline_s = _deadline_s(seq, now_s, limit_s)
        fill = Fill(seq, deadline_s, [block.key for block in blocks], load, first, left.read_s)
        if not self._begin_reads(blocks, load):
            return False
        self._fills[seq] = self._by_load[load] = fill
        for key in fill.keys:
            self._reading.setdefault(key, fill)
        return True

    def _find(self, keys: Sequence[bytes]) -> list[Block]:
        """Return the blocks of these keys that its own tiers hold, and those behind that others keep."""
        found = self.books.find(keys)
        if self._shared is None:
            return found
        for key in keys[len(found) :]:
            if (seen := self._shared.find(key)) is None:
                break
            place = Place(self._shared_tier, seen.slot)
            found.append(Block(key, None, 0, place, 0, SlotState.HELD, seen.digest))
        return found

    def _waits_for_look(self, seq: EngineSequence, now_s: float) -> bool:
        """Begin a look at what others keep, if the last one is old; return whether `seq` waits for it."""
        if self._shared is None or self._health.is_off(self._shared_tier):
            return False
        if self._look is None:
            look = Look(self._shared, self._shared_tier)
            if now_s < self._look_again_s or not self.thread.submit(look):
                return False
            self._look = look
        self._fills[seq] = Fill(seq, _deadline_s(seq, now_s, _LOOK_WAITS_S), behind=self._look)
        return True

    def _note_look(self, look: Look) -> None:
        self._look, look.is_over = None, True
        self._look_again_s = self._clock() + max(_LOOK_AGAIN_S, _LOOK_SHARE * look.took_s)
        if look.error is not None:
            self._health.note_error(self._shared_tier, str(look.error), reading=True)

    def _count_look_up(self, seq: EngineSequence, found: bool, is_first: bool) -> None:
        if is_first and seq.retractions == 0:
            self.counts.hits += found
            self.counts.misses += not found

    def read_ahead(self, waiting: Iterable[EngineSequence]) -> None:
        """Have what files hold for those next in turn read while they wait, as far as it is worth reading.

        The bytes stay in the kernel's page cache. They take no slot of a nearer tier, so nothing has to be
        written to a file in their place.
        """
        if self.is_lost or not any(self.books.in_files):
            return
        ahead_bytes = 0
        for seq in islice(waiting, _READ_AHEAD_FOR):
            if seq.ahead_bytes is None and ahead_bytes < _MOST_AHEAD_BYTES:
                self._read_ahead(seq, _MOST_AHEAD_BYTES - ahead_bytes)
            ahead_bytes += seq.ahead_bytes or 0

    def _read_ahead(self, seq: EngineSequence, most_bytes: int) -> None:
        cached_pages = seq.lookup.cached_pages if seq.lookup is not None else 0
        found = self._trusted(self._find(self._wanted(seq)))[cached_pages // self._block_pages :]
        worth = found if self._left(found, self._computed_per_s).is_worth_reading else ()
        in_files = [block.place for block in worth if self._in_files[block.place.tier]]
        places = in_files[: most_bytes // self._block_bytes]
        if not places or self.thread.submit(ReadAhead(places)):
            seq.ahead_bytes = len(places) * self._block_bytes
            self.counts.tokens_ahead += len(places) * self._block_tokens

    def leave(self, seq: EngineSequence) -> None:
        if (fill := self._fills.get(seq)) is not None:
            self._end(fill)

    def turn(self) -> bool:
        """Handle finished copies, cut late reads, and begin to store the pages that are evicted next.

        Return True where a sequence that was filling now computes, or reads once more.
        """
        now_s, num_fills = self._clock(), len(self._fills)
        self._take_ended()
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
        num_done = fill.load.num_done if fill.load is not None else 0
        seq.computed = max(before, (fill.first_block + num_done) * self._block_tokens)
        seq.stored = max(seq.stored, seq.computed)
        if seq.phase is Phase.FILLING:
            seq.phase, seq.began_s = Phase.COMPUTING, self._clock()
        self.counts.tokens_up += seq.computed - before
        if seq.retractions == 0:  # Otherwise it computed them itself before.
            seq.reused_tokens += seq.computed - before
            seq.brought_tokens += seq.computed - before
        self._hooks.publish(seq)
        self._hooks.offer(seq)
        if fill.behind is not None:
            self._hooks.catch_up(seq)
            self.enter(seq, may_wait=isinstance(fill.behind, Look) and fill.behind.is_over)
        if seq.phase is Phase.RECEIVING and seq not in self._fills:
            self._hooks.report(seq)

    def _wanted(self, seq: EngineSequence) -> list[bytes]:
        limit = seq.matchable_tokens
        ids = seq.ids if limit is None else seq.ids[:limit]
        scope_key = scope(self._layout, self._block_tokens, seq.request.kv_scope)
        return keys_of(scope_key, ids, self._block_tokens)

    def _trusted(self, blocks: Sequence[Block]) -> Sequence[Block]:
        for index, block in enumerate(blocks):
            if self._health.is_off(block.place.tier):
                return blocks[:index]
        return blocks

    def _worth_reading(self, blocks: Sequence[Block], computed_tokens_per_s: float) -> Sequence[Block]:
        """Return the blocks before the first whose tier reads more slowly than we compute; turn it off."""
        for index, block in enumerate(blocks):
            if not self._left(blocks[index : index + 1], computed_tokens_per_s).is_worth_reading:
                self._health.turn_off(block.place.tier, "it reads slower than we compute")
                return blocks[:index]
        return blocks

    def _left(self, blocks: Sequence[Block], computed_tokens_per_s: float) -> Left:
        read_s = sum(self._health.trust[block.place.tier].seconds(self._block_bytes) for block in blocks)
        return Left(read_s, len(blocks) * self._block_tokens, computed_tokens_per_s)

    def _pieces(self, seq: EngineSequence, blocks: Sequence[Block], first: int) -> list[CopyPiece]:
        assert seq.pages is not None
        pieces, per_block = [], self._block_pages
        num_had = seq.computed // self._layout.page_size
        for index, block in enumerate(blocks, start=first):
            begin = max(num_had, index * per_block)
            pages = tuple(seq.pages.pages[begin : (index + 1) * per_block])
            pieces.append(CopyPiece(block, block.place, block.digest, begin - index * per_block, pages))
        return pieces

    def _begin_reads(self, blocks: Sequence[Block], load: LoadCopy) -> bool:
        if not self.thread.submit(load):
            return False
        for block in blocks:  # This thread notes later that the read has ended.
            if block.place.tier != self._shared_tier:
                self.books.begin_read(block)
        return True

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
                self.counts.tokens_shared += self._block_tokens
            elif not is_good and self._shared is not None:
                self._shared.forget(piece.block.key)
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
        self.counts.slots = sum(self._num_slots)
        self.counts.held = self.books.num_held
        self.counts.is_off = self._is_off
        return self.counts

    @property
    def _is_off(self) -> bool:
        return self.is_lost or self._health.any_off

    def rated(self, load: RankLoad) -> RankLoad:
        """Return the load with how fast the tiers are read. Any thread may call it."""
        rates = {False: 0.0, True: 0.0}
        for in_files, trust in zip(self._in_files, self._health.trust, strict=False):
            known = [rate for rate in (rates[in_files], trust.bytes_per_s) if rate]
            rates[in_files] = min(known, default=0.0)  # Of several tiers in files the slowest counts.
        told = (rates[False], rates[True], self._is_off)
        if told == (load.memory_tier_bytes_per_s, load.file_tier_bytes_per_s, load.tiers_off):
            return load
        memory, files, is_off = told
        return replace(load, memory_tier_bytes_per_s=memory, file_tier_bytes_per_s=files, tiers_off=is_off)

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

    def _next_ended(self) -> Copy | None:
        try:
            return self._ended.get_nowait()
        except Empty:
            return None


def _deadline_s(seq: EngineSequence, now_s: float, limit_s: float) -> float:
    return now_s + (min(limit_s, _TICKET_WAITS_S) if seq.phase is Phase.RECEIVING else limit_s)
