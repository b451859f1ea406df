"""A core stores in its tiers what its pool may evict next. A full tier hands its oldest on to the next one.

Rule 1: nobody waits for a copy down. A page that is evicted before it is copied is not copied any more; the
        blocks before it stay stored.
        Likewise, what the write budget keeps out of a file for now is lost if it is evicted first.
Rule 2: a block is stored after its parent. So a tier has all blocks before each of its blocks, and a process
        that begins with an empty pool finds whole prefixes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from services.kv.prefix_cache import PrefixCache
from services.kv.radix_tree import Node
from services.kv.tiers.books import Block, SlotState, TierBooks
from services.kv.tiers.tier_keys import ROOT, next_key, scope
from services.kv.tiers.wait_or_cut import TierTrust
from services.kv.tiers.write_budget import WriteBudget
from services.tier.copies import Clock, Move, Store
from services.tier.thread import TierThread
from services.values.kv import KvLayout, PageBooks, PageId

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02  # It looks for pages to store at most this often.
_LOOK_SHARE = 20  # After a look it rests for so many times the look's duration.
_MOST_WAITING = 32  # It does not look while so many copies down are waiting.
_MOST_MOVES = 8
# This fraction (one in so many) of a tier's slots is kept free, where another tier is below it.
_ROOM_SHARE = 16


@dataclass(slots=True)
class TierCounts:
    """The values count since the start, except for the last three."""

    tokens_up: int = 0
    tokens_down: int = 0
    tokens_ahead: int = 0  # Files were read for them before it was their request's turn.
    tokens_shared: int = 0  # They were among those up, and read from other ranks' files.
    bytes_up: int = 0
    bytes_down: int = 0
    file_bytes: int = 0  # These were written to files, from the pool or from a tier above.
    hits: int = 0  # It counts prompts of which a tier held more than the pool.
    misses: int = 0
    loads: dict[str, int] = field(default_factory=dict)  # They are counted by how they ended.
    overtaken: int = 0  # It counts pages that were evicted before they were copied.
    errors: int = 0
    slots: int = 0
    held: int = 0
    is_off: bool = False


class TierHealth:
    """It counts errors of tiers, and knows which tiers are left alone for a while."""

    def __init__(self, num_tiers: int, counts: TierCounts, clock: Clock) -> None:
        self.trust = [TierTrust() for _ in range(num_tiers)]
        self._counts = counts
        self._clock = clock

    def __repr__(self) -> str:
        return f"TierHealth({self.trust})"

    @property
    def any_off(self) -> bool:
        return any(map(self.is_off, range(len(self.trust))))

    def is_off(self, tier: int) -> bool:
        return self.trust[tier].is_off(self._clock())

    def note_error(self, tier: int, why: str, *, reading: bool) -> None:
        self._counts.errors += 1
        log.warning("kv_tier_error tier=%d why=%s", tier, why)
        if self.trust[tier].note_error(self._clock(), reading=reading):
            self.turn_off(tier, why)

    def turn_off(self, tier: int, why: str) -> None:
        self.trust[tier].turn_off(self._clock())
        log.warning("kv_tier_off tier=%d why=%s", tier, why)


class Storing:
    def __init__(
        self,
        books: TierBooks,
        thread: TierThread,
        health: TierHealth,
        counts: TierCounts,
        cache: PrefixCache,
        layout: KvLayout,
        block_tokens: int,
        num_slots: Sequence[int],
        room_pages: int,
        clock: Clock,
        budget: WriteBudget,
    ) -> None:
        """Pages are stored once fewer than `room_pages` are free."""
        self._books = books
        self._thread = thread
        self._health = health
        self._counts = counts
        self._cache = cache
        self._layout = layout
        self._block_tokens = block_tokens
        self._block_pages = block_tokens // layout.page_size
        self._block_bytes = self._block_pages * layout.page_bytes
        self._num_slots = tuple(num_slots)
        self._room_pages = room_pages
        self._clock = clock
        self._budget = budget
        self._copied: dict[PageId, Store] = {}  # These pages wait to be copied, or have perhaps been copied.
        self._num_moves = 0
        self._look_at_s = 0.0
        self._looked_at: tuple[PageBooks, int] | None = None
        # The books can be equal though all pages have changed hands; this count tells the difference.
        self._num_lent = 0
        self._looks_again = False  # Too many copies were waiting, so it looks again when one ends.
        self._moves_at_s: float | None = None  # The budget allows the next move then.

    def __repr__(self) -> str:
        return f"Storing(pages={len(self._copied)} moves={self._num_moves})"

    def lent(self, pages: Sequence[PageId]) -> None:
        """Stop the copies of these pages, because they are about to be overwritten."""
        self._num_lent += len(pages)
        if not self._copied:
            return
        for page in pages:
            if (store := self._copied.pop(page, None)) is not None:
                store.stop()
                self._counts.overtaken += 1

    @property
    def due_s(self) -> float | None:
        """Return when `turn` is due, or None where it is not."""
        due_s = [self._look_at_s] if self._may_store else []
        if self._moves_at_s is not None:
            due_s.append(self._moves_at_s)
        return min(due_s, default=None)

    def turn(self) -> None:
        self._store_what_goes_next(self._clock())
        self._make_room()

    @property
    def _may_store(self) -> bool:
        books = self._cache.books()
        return books.free < self._room_pages and (books, self._num_lent) != self._looked_at

    def _store_what_goes_next(self, now_s: float) -> None:
        if now_s < self._look_at_s or not self._may_store:
            return
        if self._must_wait():
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        self._looked_at = self._cache.books(), self._num_lent
        if self._thread.num_writes >= _MOST_WAITING:
            self._looks_again = True
            return
        if self._health.is_off(0):
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
            self._books.use(last)
        return len(begun) == len(nodes)

    def _unstored(self, leaf: Node) -> list[Node]:
        """Return the last node of each block down to `leaf` that no tier has, in order of position."""
        nodes: list[Node] = []
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            if node.depth % self._block_pages == 0:
                if node.tier_key and node.tier_key in self._books:
                    break  # A tier has all blocks before it, too.
                nodes.append(node)
            node = node.parent
        for each in reversed(nodes):
            self._name(each)
        return [each for each in reversed(nodes) if each.tier_key not in self._books]

    def _name(self, node: Node) -> None:
        if node.tier_key:
            return
        path = _last_nodes(node, self._block_pages)
        parent = path[0].parent
        assert parent is not None
        parent_key = parent.tier_key or ROOT
        scope_key = scope(self._layout, self._block_tokens, node.scope.salt)
        node.tier_key = next_key(scope_key, parent_key, b"".join(each.key for each in path))

    def _wait_s(self, tier: int) -> float:
        """Return the seconds until the budget allows the next write to this tier."""
        return self._budget.wait_s(self._clock()) if self._books.in_files[tier] else 0.0

    def _must_wait(self) -> bool:
        """Return whether nothing may be stored now; it looks again once the budget allows it."""
        if (wait_s := self._wait_s(0)) > 0:
            self._looked_at, self._look_at_s = None, self._clock() + wait_s
        return wait_s > 0

    def _note_begun(self, tier: int) -> None:
        if self._books.in_files[tier]:
            self._budget.spend(self._block_bytes)

    def _note_written(self, tier: int) -> None:
        if self._books.in_files[tier]:
            self._counts.file_bytes += self._block_bytes

    def _store(self, node: Node) -> Block | None:
        if self._must_wait():
            return None
        path = _last_nodes(node, self._block_pages)
        parent = path[0].parent
        assert parent is not None
        block = self._books.claim(node.tier_key, parent.tier_key or ROOT, node.block_hash or 0)
        if block is None:
            return None
        store = Store(block, [each.page for each in path])
        if not self._thread.submit(store):
            self._books.write_failed(block)
            self._looks_again = True
            return None
        self._note_begun(0)
        for page in store.pages:
            self._copied[page] = store
        return block

    def note_store(self, store: Store) -> None:
        if self._looks_again:
            self._looked_at, self._looks_again = None, False
        for page in store.pages:
            if self._copied.get(page) is store:
                del self._copied[page]
        if store.digest is not None:
            self._books.written(store.block, store.digest)
            self._counts.tokens_down += self._block_tokens
            self._counts.bytes_down += self._block_bytes
            self._note_written(0)
            self._health.trust[0].note_written()
            return
        self._books.write_failed(store.block)
        if store.error is not None:
            self._health.note_error(0, str(store.error), reading=False)

    def _make_room(self) -> None:
        """Move the blocks that were not used for longest to the next tier, before their slots are needed."""
        self._moves_at_s = None
        for tier, count in enumerate(self._num_slots[:-1]):
            wanted = -(-count // _ROOM_SHARE)
            while self._num_moves < _MOST_MOVES and self._books.free_slots(tier) + self._num_moves < wanted:
                if self._health.is_off(tier + 1) or not self._move_one(tier):
                    break

    def _move_one(self, tier: int) -> bool:
        if (wait_s := self._wait_s(tier + 1)) > 0:
            self._moves_at_s = self._clock() + wait_s
            return False
        if (block := self._books.begin_move(tier)) is None:
            return False
        move = Move(block)
        if not self._thread.submit(move):
            self._books.moved(block, good=False)
            return False
        self._num_moves += 1
        self._note_begun(tier + 1)
        return True

    def note_move(self, move: Move) -> None:
        self._num_moves -= 1
        self._books.moved(move.block, good=move.is_done)
        if move.is_done:
            self._note_written(move.target_tier)
        if move.has_failed_to_read:
            why = "a digest differs" if move.error is None else str(move.error)
            self._health.note_error(move.source_tier, why, reading=True)
            self._books.drop(move.block)
        elif move.error is not None:
            self._health.note_error(move.target_tier, str(move.error), reading=False)

    def check(self) -> None:
        for page, store in self._copied.items():
            assert store.block.state is not SlotState.HELD, f"page {page} still waits to be copied"


def _last_nodes(node: Node, count: int) -> list[Node]:
    path: list[Node] = []
    at: Node | None = node
    while at is not None and len(path) < count:
        path.append(at)
        at = at.parent
    return path[::-1]
