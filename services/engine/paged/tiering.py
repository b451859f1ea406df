"""A core's tiers keep KV below its pool: it reads prefixes from them, and stores what it may evict next.

    up      admitted, a tier holds more --> FILLING --read, compared, published--> COMPUTING
                                               |----cut, late, corrupt, failed-----^   with the blocks read
    down    free pages run short: all that is cached, in order of eviction, each block after its parent
              --> copied by the tier's thread, while the pages stay evictable

A sequence that fills has its pages, like one that computes; the tier's thread writes those that it shares
with nobody. A sequence that shares a prefix which is being read waits for that read, and then matches the
tree. So there is one read, and nobody waits in a chain.

Rule 1: pages are published only when their bytes have been compared.
Rule 2: nobody waits for a copy down. A page that is evicted before it is copied is not copied any more; the
        blocks before it stay stored.
Rule 3: a block is stored after its parent. So a tier has all blocks before each of its blocks, and a process
        that begins with an empty pool finds whole prefixes.
Rule 4: whatever happens to a read, the sequence computes the rest: a tier may cost time, but no request.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from queue import Empty, SimpleQueue

from services.engine.paged.sequence import Phase
from services.engine.paged.sequence import Sequence as EngineSequence
from services.kv.prefix_cache import PrefixCache
from services.kv.radix_tree import Node
from services.kv.tiers.books import Block, SlotState, TierBooks
from services.kv.tiers.tier_keys import ROOT, keys_of, next_key, scope
from services.kv.tiers.wait_or_cut import Left, TierTrust
from services.tier.copies import Clock, Copy, CopyPace, CopyPiece, LoadCopy, LoadEnd, Move, Store
from services.tier.thread import TierThread
from services.values.kv import KvLayout, PageBooks, PageId
from services.values.rank_reports import RankLoad

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02  # It looks for pages to store at most this often.
_LOOK_SHARE = 20  # After a look it rests for so many times the look's duration.
_MOST_WAITING = 32  # It does not look while so many copies down are waiting.
_MOST_MOVES = 8
# This fraction (one in so many) of a tier's slots is kept free, where another tier is below it.
_ROOM_SHARE = 16
_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class FillHooks:
    publish: Callable[[EngineSequence], None]
    offer: Callable[[EngineSequence], None]
    catch_up: Callable[[EngineSequence], None]
    load: Callable[[], RankLoad]


@dataclass(slots=True, eq=False)
class Fill:
    """A sequence waits for a read: for its own, or for another sequence's (`behind`)."""

    seq: EngineSequence
    deadline_s: float
    keys: Sequence[bytes] = ()  # These are the blocks of its own read.
    load: LoadCopy | None = None
    first_block: int = 0
    read_s: float = 0.0  # It is the predicted duration of its own read.
    behind: "Fill | None" = None
    is_over: bool = False


@dataclass(slots=True)
class TierCounts:
    """The values count since the start, except for the last three."""

    tokens_up: int = 0
    tokens_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    hits: int = 0  # It counts prompts of which a tier held more than the pool.
    misses: int = 0
    loads: dict[str, int] = field(default_factory=dict)  # They are counted by how they ended.
    overtaken: int = 0  # It counts pages that were evicted before they were copied.
    errors: int = 0
    slots: int = 0
    held: int = 0
    is_off: bool = False


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
    ) -> None:
        """`start` begins the thread, which reports each finished copy to the function that `start` was given.

        `wake` is then called from that thread, and is to have `turn` called. Pages are stored once fewer than
        `room_pages` are free.
        """
        self.books = books
        self.counts = TierCounts()
        self._cache = cache
        self._layout = layout
        self._block_tokens = block_tokens
        self._block_pages = block_tokens // layout.page_size
        self._block_bytes = self._block_pages * layout.page_bytes
        self._num_slots = tuple(num_slots)
        self._room_pages = room_pages
        self._clock = clock
        self._wake = wake
        self._trust = [TierTrust() for _ in num_slots]
        self._ended: SimpleQueue[Copy] = SimpleQueue()
        self._fills: dict[EngineSequence, Fill] = {}
        self._reading: dict[bytes, Fill] = {}
        self._by_load: dict[LoadCopy, Fill] = {}
        self._copied: dict[PageId, Store] = {}  # These pages wait to be copied, or have perhaps been copied.
        self._num_moves = 0
        self._look_at_s = 0.0
        self._looked_at: tuple[PageBooks, int] | None = None
        # The books can be equal though all pages have changed hands; this count tells the difference.
        self._num_lent = 0
        self._looks_again = False  # Too many copies were waiting, so it looks again when one ends.
        self._hooks: FillHooks | None = None
        # The thread hangs. A sequence that waits for a read computes after its deadline.
        self.is_lost = False
        self.thread = start(self._note_ended)

    def __repr__(self) -> str:
        return f"Tiering({self.books} fills={len(self._fills)})"

    def attach(self, hooks: FillHooks) -> None:
        self._hooks = hooks

    @property
    def idle_s(self) -> float | None:
        """Return the seconds until `turn` is due without any finished copy, or None where it is not due."""
        due_s = [fill.deadline_s for fill in self._fills.values()]
        if self._may_store:
            due_s.append(self._look_at_s)
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    # -- up ---------------------------------------------------------------------------------------

    def enter(self, seq: EngineSequence, *, may_wait: bool = True) -> None:
        """Begin to read what a tier holds beyond the cached prefix of a sequence that is to compute.

        The sequence has its pages, and nobody else writes them. With `may_wait` it may wait for another read.
        """
        assert self._hooks is not None
        if not self.is_lost and self._begin(seq, self._hooks.load().prefill_tokens_per_s, may_wait):
            seq.phase = Phase.FILLING

    def _begin(self, seq: EngineSequence, computed_tokens_per_s: float, may_wait: bool) -> bool:
        now_s = self._clock()
        first, keys = seq.computed // self._block_tokens, self._wanted(seq)
        if len(keys) <= first:
            return False
        blocks = self._trusted(self.books.find(keys)[first:], now_s)
        if not blocks:
            self.counts.misses += 1
            return False
        self.books.use(blocks[-1])
        self.counts.hits += 1
        if may_wait and (other := self._reading.get(blocks[0].key)) is not None:
            self._fills[seq] = Fill(seq, other.deadline_s, behind=other)
            return True
        if not (blocks := self._worth_reading(blocks, computed_tokens_per_s, now_s)):
            return False
        left = self._left(blocks, computed_tokens_per_s)
        load = LoadCopy(self._pieces(seq, blocks, first), CopyPace(self._block_tokens, computed_tokens_per_s))
        waits_s = sum(fill.read_s for fill in self._fills.values())  # Earlier reads come first.
        limit_s = replace(left, read_s=waits_s + left.read_s).limit_s
        fill = Fill(seq, now_s + limit_s, [block.key for block in blocks], load, first, left.read_s)
        if not self._begin_reads(blocks, load):
            return False
        self._fills[seq] = self._by_load[load] = fill
        for key in fill.keys:
            self._reading.setdefault(key, fill)
        return True

    def leave(self, seq: EngineSequence) -> None:
        if (fill := self._fills.get(seq)) is not None:
            self._end(fill)

    def turn(self) -> bool:
        """Handle finished copies, cut late reads, and begin to store the pages that are evicted next.

        Return True where a sequence that was filling now computes, or reads once more.
        """
        now_s, num_fills = self._clock(), len(self._fills)
        self._take_ended(now_s)
        waited = [fill for fill in self._fills.values() if self._has_waited(fill, now_s)]
        late = [fill for fill in self._fills.values() if fill.load is not None and now_s >= fill.deadline_s]
        for fill in waited:
            self._go_on(fill)
        for fill in late:
            assert fill.load is not None
            late_ones = fill.load.pieces[fill.load.num_done :][:1]
            tiers = {piece.place.tier for piece in late_ones}
            self._note_error(tiers, now_s, "a read is late", reading=True)
            self._go_on(fill)
        self._store_what_goes_next(now_s)
        self._make_room()
        return bool(waited) or len(self._fills) < num_fills

    def _take_ended(self, now_s: float) -> None:
        while (copy := self._next_ended()) is not None:
            match copy:
                case LoadCopy():
                    self._note_load(copy, now_s)
                case Store():
                    self._note_store(copy, now_s)
                case Move():
                    self._note_move(copy, now_s)

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
        seq.phase, seq.began_s = Phase.COMPUTING, self._clock()
        self.counts.tokens_up += seq.computed - before
        if seq.retractions == 0:  # Otherwise it computed them itself before.
            seq.reused_tokens += seq.computed - before
        self._hooks.publish(seq)
        self._hooks.offer(seq)
        if fill.behind is not None:
            self._hooks.catch_up(seq)
            self.enter(seq, may_wait=False)

    def _wanted(self, seq: EngineSequence) -> list[bytes]:
        limit = seq.matchable_tokens
        ids = seq.ids if limit is None else seq.ids[:limit]
        scope_key = scope(self._layout, self._block_tokens, seq.request.cache_salt)
        return keys_of(scope_key, ids, self._block_tokens)

    def _trusted(self, blocks: Sequence[Block], now_s: float) -> Sequence[Block]:
        for index, block in enumerate(blocks):
            if self._trust[block.place.tier].is_off(now_s):
                return blocks[:index]
        return blocks

    def _worth_reading(
        self, blocks: Sequence[Block], computed_tokens_per_s: float, now_s: float
    ) -> Sequence[Block]:
        """Return the blocks before the first whose tier reads more slowly than we compute; turn it off."""
        for index, block in enumerate(blocks):
            if not self._left(blocks[index : index + 1], computed_tokens_per_s).is_worth_reading:
                self._turn_off({block.place.tier}, now_s, "it reads slower than we compute")
                return blocks[:index]
        return blocks

    def _left(self, blocks: Sequence[Block], computed_tokens_per_s: float) -> Left:
        read_s = sum(self._trust[block.place.tier].seconds(self._block_bytes) for block in blocks)
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

    def _note_load(self, load: LoadCopy, now_s: float) -> None:
        is_bad = load.end in (LoadEnd.CORRUPT, LoadEnd.FAILED)
        for index, piece in enumerate(load.pieces):
            self.books.end_read(piece.block, good=not (is_bad and index == load.num_done))
        self.counts.loads[load.end.value] = self.counts.loads.get(load.end.value, 0) + 1
        for tier, num_bytes in load.read_bytes.items():
            self.counts.bytes_up += num_bytes
            self._trust[tier].note_read(num_bytes, load.read_s[tier])
        if is_bad:
            why = "a digest differs" if load.end is LoadEnd.CORRUPT else str(load.error)
            self._note_error({load.pieces[load.num_done].place.tier}, now_s, why, reading=True)
        fill = self._by_load.pop(load)
        if not fill.is_over:
            self._go_on(fill)

    # -- down -------------------------------------------------------------------------------------

    def lent(self, pages: Sequence[PageId]) -> None:
        """Stop the copies of these pages, because they are about to be overwritten."""
        self._num_lent += len(pages)
        if not self._copied:
            return
        for page in pages:
            if (store := self._copied.pop(page, None)) is not None:
                store.stop()
                self.counts.overtaken += 1

    @property
    def _may_store(self) -> bool:
        books = self._cache.books()
        return (
            books.free < self._room_pages and (books, self._num_lent) != self._looked_at and not self.is_lost
        )

    def _store_what_goes_next(self, now_s: float) -> None:
        if now_s < self._look_at_s or not self._may_store:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        self._looked_at = self._cache.books(), self._num_lent
        if self.thread.num_writes >= _MOST_WAITING:
            self._looks_again = True
            return
        if self._trust[0].is_off(now_s):
            return
        # The other slots keep what was evicted earlier.
        num_pages, most_pages = 0, self._num_slots[0] * self._block_pages // 2
        for leaf in self._cache.next_to_go():
            if num_pages >= most_pages or not self._store_all(self._unstored(leaf)):
                break
            num_pages += leaf.depth
        self._look_at_s += _LOOK_SHARE * (self._clock() - now_s)

    def _store_all(self, nodes: Sequence[Node]) -> bool:
        begun = list(takewhile(lambda block: block is not None, map(self._store, nodes)))
        if begun and (last := begun[-1]) is not None:
            self.books.use(last)
        return len(begun) == len(nodes)

    def _unstored(self, leaf: Node) -> list[Node]:
        """Return the last node of each block down to `leaf` that no tier has, in order of position."""
        nodes: list[Node] = []
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            if node.depth % self._block_pages == 0:
                if node.tier_key and node.tier_key in self.books:
                    break  # A tier has all blocks before it, too.
                nodes.append(node)
            node = node.parent
        for each in reversed(nodes):
            self._name(each)
        return [each for each in reversed(nodes) if each.tier_key not in self.books]

    def _name(self, node: Node) -> None:
        if node.tier_key:
            return
        path = _last_nodes(node, self._block_pages)
        parent = path[0].parent
        assert parent is not None
        parent_key = parent.tier_key or ROOT
        scope_key = scope(self._layout, self._block_tokens, node.scope.salt)
        node.tier_key = next_key(scope_key, parent_key, b"".join(each.key for each in path))

    def _store(self, node: Node) -> Block | None:
        path = _last_nodes(node, self._block_pages)
        parent = path[0].parent
        assert parent is not None
        block = self.books.claim(node.tier_key, parent.tier_key or ROOT, node.block_hash or 0)
        if block is None:
            return None
        store = Store(block, [each.page for each in path])
        if not self.thread.submit(store):
            self.books.write_failed(block)
            self._looks_again = True
            return None
        for page in store.pages:
            self._copied[page] = store
        return block

    def _note_store(self, store: Store, now_s: float) -> None:
        if self._looks_again:
            self._looked_at, self._looks_again = None, False
        for page in store.pages:
            if self._copied.get(page) is store:
                del self._copied[page]
        if store.digest is not None:
            self.books.written(store.block, store.digest)
            self.counts.tokens_down += self._block_tokens
            self.counts.bytes_down += self._block_bytes
            self._trust[0].note_written()
            return
        self.books.write_failed(store.block)
        if store.error is not None:
            self._note_error({0}, now_s, str(store.error), reading=False)

    def _make_room(self) -> None:
        """Move the blocks that were not used for longest to the next tier, before their slots are needed."""
        for tier, count in enumerate(self._num_slots[:-1]):
            wanted = -(-count // _ROOM_SHARE)
            while self._num_moves < _MOST_MOVES and self.books.free_slots(tier) + self._num_moves < wanted:
                if self._trust[tier + 1].is_off(self._clock()) or not self._move_one(tier):
                    break

    def _move_one(self, tier: int) -> bool:
        if (block := self.books.begin_move(tier)) is None:
            return False
        move = Move(block)
        if not self.thread.submit(move):
            self.books.moved(block, good=False)
            return False
        self._num_moves += 1
        return True

    def _note_move(self, move: Move, now_s: float) -> None:
        self._num_moves -= 1
        self.books.moved(move.block, good=move.is_done)
        if move.error is not None:
            self._note_error({move.tiers[1]}, now_s, str(move.error), reading=False)
        elif not move.is_done:
            self.books.drop(move.block)

    # -- for both ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop touching the pool, and release the slabs to the rank's next process."""
        self.thread.stop(_STOP_S)

    def figures(self) -> TierCounts:
        now_s = self._clock()
        self.counts.slots = sum(self._num_slots)
        self.counts.held = len(self.books)
        self.counts.is_off = self.is_lost or any(trust.is_off(now_s) for trust in self._trust)
        return self.counts

    def check(self, active: Iterable[EngineSequence]) -> None:
        self.books.check()
        filling = {seq for seq in active if seq.phase is Phase.FILLING}
        assert filling == self._fills.keys(), f"{filling} fill, {self} has others"
        for page, store in self._copied.items():
            assert store.block.state is not SlotState.HELD, f"page {page} still waits to be copied"
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

    def _note_error(self, tiers: set[int], now_s: float, why: str, *, reading: bool) -> None:
        self.counts.errors += 1
        log.warning("kv_tier_error tier=%s why=%s", sorted(tiers), why)
        off = {tier for tier in tiers if self._trust[tier].note_error(now_s, reading=reading)}
        if off:
            self._turn_off(off, now_s, why)

    def _turn_off(self, tiers: set[int], now_s: float, why: str) -> None:
        for tier in tiers:
            self._trust[tier].turn_off(now_s)
        log.warning("kv_tier_off tier=%s why=%s", sorted(tiers), why)


def _last_nodes(node: Node, count: int) -> list[Node]:
    path: list[Node] = []
    at: Node | None = node
    while at is not None and len(path) < count:
        path.append(at)
        at = at.parent
    return path[::-1]
