"""A core stores in its tiers what its pool may evict next. A full tier hands its oldest on to the next one.

Rule 1: nobody waits for a copy down. A page that is evicted before it is copied is not copied any more; the
        blocks before it stay stored.
        Likewise, what the write budget keeps out of a file for now is lost if it is evicted first.
Rule 2: a block is stored after its parent. So a tier has all blocks before each of its blocks, and a process
        that begins with an empty pool finds whole prefixes.

Where the layout has per-request state, a prefix is worth little without a checkpoint. So the checkpoints on a
path that are expected to be used are stored with its blocks; and so are those of least worth, with the blocks
before them, once few units are free.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from services.engine.paged.tier_health import TierCounts, TierHealth
from services.engine.paged.tier_keeping import ends_to_keep
from services.engine.paged.tiered_pool import TieredPool
from services.kv.checkpoints import SavedPoint
from services.kv.radix_tree import Node
from services.kv.tiers.block import Block, SlotState
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import SlotKind
from services.kv.tiers.tier_keys import ROOT, next_key
from services.kv.tiers.write_budget import WriteBudget
from services.tier.copies import Clock, Move, Store
from services.tier.thread import TierThread
from services.values.kv import PageBooks, PageId

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02  # It looks for pages to store at most this often.
_LOOK_SHARE = 20  # After a look it rests for so many times the look's duration.
_MOST_WAITING = 32  # It does not look while so many copies down are waiting.
_MOST_MOVES = 8
# A rank that leaves stores, and moves, at most so many times what fits: parts of checkpoints may push each
# other out, and what still runs may go on.
_MOST_KEPT = 2
# This fraction (one in so many) of a tier's slots is kept free, where another tier is below it.
_ROOM_SHARE = 16
# Checkpoints are stored, this fraction of them at a time, once less than it of the units for them is free.
_POINTS_SHARE = 8

_State = tuple[PageBooks, int, int, int, tuple[int, ...]]


class Storing:
    def __init__(
        self,
        books: TierBooks,
        thread: TierThread,
        health: TierHealth,
        counts: TierCounts,
        pool: TieredPool,
        room_pages: int,
        clock: Clock,
        budget: WriteBudget,
    ) -> None:
        """Pages are stored once fewer than `room_pages` are free."""
        self._books = books
        self._thread = thread
        self._health = health
        self._counts = counts
        self._pool = pool
        self._points = pool.carried.points
        self._points.copied_no_more = self._copy_no_more
        self._block_pages, self._block_bytes = pool.block_pages, pool.slot_bytes
        self._room_pages = room_pages
        self._clock = clock
        self._budget = budget
        # These pages and checkpoints wait to be copied, or have perhaps been copied.
        self._copied: dict[PageId, Store] = {}
        self._copied_points: dict[SavedPoint, Store] = {}
        self._pages: dict[Store, Sequence[PageId]] = {}
        self._point_of: dict[Store, SavedPoint] = {}
        self._keys: dict[SavedPoint, tuple[bytes, ...]] = {}  # They name the parts of checkpoints.
        self._num_moves = 0
        self._look_at_s = 0.0
        self._looked_at: _State | None = None
        # The books can be equal though all pages have changed hands; this count tells the difference.
        self._num_lent = 0
        self._looks_again = False  # Too many copies were waiting, so it looks again when one ends.
        self._moves_at_s: float | None = None  # The budget allows the next move then.
        self._keeps_all = False
        self._num_kept = self._num_moved = 0  # So many slots were written to keep all.
        # 1: the tier before it is in memory, as one may be, and ends with the rank's worker. It is 0 as well
        # where none is in files.
        self._first_file = next((tier for tier, is_file in enumerate(books.in_files) if is_file), 0)
        self._has_moved_all = False
        self._looks_after_move = False

    def __repr__(self) -> str:
        return f"Storing(pages={len(self._copied)} moves={self._num_moves})"

    def lent(self, pages: Sequence[PageId]) -> None:
        """Discard the copies of these pages, because they are about to be overwritten."""
        self._num_lent += len(pages)
        if not self._copied:
            return
        for page in pages:
            if (store := self._copied.pop(page, None)) is not None:
                store.discard()
                self._counts.overtaken += 1

    def _copy_no_more(self, point: SavedPoint) -> None:
        self._keys.pop(point, None)
        if (store := self._copied_points.pop(point, None)) is not None:
            store.discard()
            self._counts.overtaken += 1

    @property
    def due_s(self) -> float | None:
        """Return when `turn` is due, or None where it is not."""
        due_s = [self._look_at_s] if self._may_store else []
        if self._moves_at_s is not None:
            due_s.append(self._moves_at_s)
        return min(due_s, default=None)

    def keep_all(self, keeps: bool) -> None:
        """Store all that is cached, or what was used last of it, in the first tier that is in files.

        A tier in memory ends with the rank's worker. So what it holds is moved on to the files, and nothing
        is stored where there are none.
        """
        keeps = keeps and any(self._books.in_files)
        if keeps and not self._keeps_all:  # What an earlier look left out is stored now.
            self._looked_at, self._look_at_s = None, 0.0
            self._num_kept = self._num_moved = 0
            self._has_moved_all = False
        if keeps != self._keeps_all:
            self._books.number_down(keeps)
        self._keeps_all = keeps

    @property
    def has_kept_all(self) -> bool:
        """Return whether nothing is left to store, or nothing was to be kept."""
        is_busy = self._may_store or self._looks_again or self._pages or self._point_of
        return not (self._keeps_all and (is_busy or not self._has_moved_all))

    def turn(self) -> None:
        self._store_what_goes_next(self._clock())
        self._make_room()
        if self._keeps_all:
            self._move_all()

    @property
    def _may_store(self) -> bool:
        return (self._lacks_pages or self._lacks_units) and self._state != self._looked_at

    @property
    def _lacks_pages(self) -> bool:
        return self._keeps_all or self._pool.cache.books().free < self._room_pages

    @property
    def _lacks_units(self) -> bool:
        pools = self._pool.carried.pools()
        return any(_POINTS_SHARE * pool.free < pool.total for pool in pools)

    @property
    def _state(self) -> _State:
        num_slots = tuple(self._books.num_slots)  # A tier may be opened late.
        return self._pool.cache.books(), self._num_lent, len(self._points), self._points.evictions, num_slots

    def _store_what_goes_next(self, now_s: float) -> None:
        if now_s < self._look_at_s or not self._may_store:
            return
        if self._must_wait():
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        self._looked_at = self._state
        if self._thread.num_writes >= _MOST_WAITING:
            self._looks_again = True
            return
        if self._health.is_off(0) or not self._books.num_slots[0]:
            return
        if self._keeps_all:  # Nothing runs that this could delay.
            if self._num_kept < self._most_kept:
                self._store_most_recent()
            return
        # The other slots keep what was evicted earlier.
        left = self._books.num_slots[0] // 2
        for node, points in self._next_to_go():
            if left <= 0 or not (self._store_all(self._unstored(node)) and self._store_points(points)):
                break
            left -= node.depth // self._block_pages
            left -= sum(self._pool.num_parts(point.position) for _, point in points)
        self._look_at_s += _LOOK_SHARE * (self._clock() - now_s)

    def _store_most_recent(self) -> None:
        """Store what was used last first, because the rank may have to end before all is stored."""
        ends = ends_to_keep(self._pool, self._books.num_slots[self._first_file])
        for end in ends:  # Nothing of these is pushed out.
            self._use_stored(end)
        for end in reversed(ends):
            if not (self._store_all(self._unstored(end)) and self._store_points(self._points.to_use(end))):
                self._looks_after_move = True
                break
        # Slots that are being written cannot make room, and what is written is used in order then.
        self._looks_again |= bool(self._pages or self._point_of)

    def _use_stored(self, leaf: Node) -> None:
        """Use what the tiers have of the path."""
        node = leaf
        while node.parent is not None:
            if node.tier_key and (found := self._books.find([node.tier_key])):
                self._books.use(found[0])
                return
            node = node.parent

    def _next_to_go(self) -> Iterator[tuple[Node, list[tuple[Node, SavedPoint]]]]:
        """Yield the end of each path to store, with the checkpoints on it."""
        if self._lacks_units:
            for node, point in self._points.next_to_go(1 + len(self._points) // _POINTS_SHARE):
                yield node, [(node, point)]
        if self._lacks_pages:
            for leaf in self._pool.cache.next_to_go():
                yield leaf, list(self._points.to_use(leaf))

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
        packed_block = b"".join(each.key for each in path)
        node.tier_key = next_key(self._pool.scope(node.scope.salt), parent_key, packed_block)

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

    @property
    def _most_kept(self) -> int:
        return _MOST_KEPT * self._books.num_slots[self._first_file]

    def _is_kept_out(self, num_slots: int) -> bool:
        """Return whether a rank that leaves has stored enough, or would push out what is still to be moved to
        the files."""
        if not self._keeps_all:
            return False
        has_to_move = self._first_file > 0 and not self._has_moved_all
        return self._num_kept + num_slots > self._most_kept or (
            has_to_move and self._books.free_slots(0) < num_slots
        )

    def _store(self, node: Node) -> Block | None:
        if self._must_wait() or self._is_kept_out(1):
            return None
        path = _last_nodes(node, self._block_pages)
        parent = path[0].parent
        assert parent is not None
        pages = [each.page for each in path]
        block = self._books.claim(
            *(node.tier_key, parent.tier_key or ROOT, node.block_hash or 0),
            with_draft=self._pool.has_draft(pages),
        )
        if block is None:
            return None
        store = Store((block, self._pool.block_spans(pages)))
        if not self._begin(store):
            return None
        self._pages[store] = pages
        for page in pages:
            self._discard(self._copied.get(page))
            self._copied[page] = store
        return block

    def _store_points(self, points: Iterable[tuple[Node, SavedPoint]]) -> bool:
        return all([self._store_point(node, point) for node, point in points])

    def _store_point(self, node: Node, point: SavedPoint) -> bool:
        """Begin to store all parts of a checkpoint. Return False where that cannot be done now."""
        if (keys := self._keys.get(point)) is None:
            keys = tuple(self._pool.part_keys(node.scope.salt, node.tier_key, point.position))
            self._keys[point] = keys
        if not keys or keys[-1] in self._books or 2 * len(keys) > self._books.num_slots[0]:
            return True
        if self._must_wait() or self._is_kept_out(len(keys)):
            return False
        for left in self._books.find(keys[:1]):  # These parts' end is gone.
            self._books.drop(left)
        blocks = self._claim_parts(node, keys)
        spans = self._pool.part_spans(self._pool.carried.units_of_point(point))
        store = Store(*zip(blocks, spans, strict=False))
        if len(blocks) < len(keys):
            self._give_up(store)
            return False
        if not self._begin(store):
            return False
        self._books.use(blocks[-1])
        self._discard(self._copied_points.get(point))
        self._copied_points[point], self._point_of[store] = store, point
        return True

    def _claim_parts(self, node: Node, keys: Sequence[bytes]) -> list[Block]:
        blocks, parent_key = list[Block](), node.tier_key
        for key in keys:
            kind = SlotKind.END if key is keys[-1] else SlotKind.PART
            if (block := self._books.claim(key, parent_key, node.block_hash or 0, kind)) is None:
                break
            blocks.append(block)
            parent_key = key
        return blocks

    def _begin(self, store: Store) -> bool:
        if not self._thread.submit(store):
            self._give_up(store)
            self._looks_again = bool(self._pages or self._point_of)
            if not self._looks_again:  # The thread's queue is full of others' copies.
                self._looked_at = None
            return False
        self._num_kept += len(store.blocks)
        for _ in store.blocks:
            self._note_begun(0)
        return True

    def _discard(self, earlier: Store | None) -> None:
        """Discard an earlier copy of the same units. Only the last one is discarded when they get a new
        owner, so this one would write the new owner's KV under the old key."""
        if earlier is not None:
            earlier.discard()

    def _give_up(self, store: Store) -> None:
        """Free the slots that are not written; of a checkpoint the others, too."""
        for block in store.blocks[len(store.digests) :]:
            self._books.write_failed(block)
        if store.blocks and store.blocks[0].kind is not SlotKind.BLOCK:
            self._books.drop(store.blocks[0])

    def note_store(self, store: Store) -> None:
        self._has_moved_all = False
        if self._looks_again:
            self._looked_at, self._looks_again = None, False
        for page in self._pages.pop(store, ()):
            if self._copied.get(page) is store:
                del self._copied[page]
        point = self._point_of.pop(store, None)
        if point is not None and self._copied_points.get(point) is store:
            del self._copied_points[point]
        for block, digest in zip(store.blocks, store.digests, strict=False):
            self._books.written(block, digest)
            self._counts.bytes_down += self._block_bytes
            self._note_written(0)
            if block.kind is SlotKind.BLOCK:
                self._counts.tokens_down += self._pool.block_tokens
        if len(store.digests) == len(store.blocks):
            self._health.trust[0].note_written()
            return
        self._give_up(store)
        if store.error is not None:
            self._health.note_error(0, str(store.error), reading=False)

    def _make_room(self) -> None:
        """Move the blocks that were not used for longest to the next tier, before their slots are needed."""
        self._moves_at_s = None
        for tier, count in enumerate(self._books.num_slots[:-1]):
            if self._keeps_all and tier < self._first_file:  # `_move_all` begins with what was used last.
                continue
            wanted = -(-count // _ROOM_SHARE)
            while self._num_moves < _MOST_MOVES and self._books.free_slots(tier) + self._num_moves < wanted:
                if self._health.is_off(tier + 1) or not self._move_one(tier):
                    break

    def _move_all(self) -> None:
        """Move what the tier in memory holds on to the first one in files, what was used last first."""
        # Where that one makes room by moves of its own, these are waited for.
        below = self._first_file + 1
        is_last = below == len(self._books.num_slots) or self._health.is_off(below)
        hands_on = bool(self._num_moves) and not is_last
        while (
            self._first_file > 0
            and self._num_moves < _MOST_MOVES
            and self._num_moved < self._most_kept
            and not self._health.is_off(self._first_file)
            and (self._books.free_slots(self._first_file) or not hands_on)
        ):
            if not self._move_one(0, newest=True):
                break
            self._num_moved += 1
        is_busy = self._num_moves or self._pages or self._point_of or self._moves_at_s is not None
        is_busy = is_busy or self._books.has_late or self._books.is_behind  # Room may be made yet.
        had_moved_all, self._has_moved_all = self._has_moved_all, not is_busy
        if self._has_moved_all and not had_moved_all and self._looks_after_move:
            self._looked_at, self._looks_after_move = None, False  # What is left in memory may be pushed out.

    def _move_one(self, tier: int, *, newest: bool = False) -> bool:
        if (wait_s := self._wait_s(tier + 1)) > 0:
            self._moves_at_s = self._clock() + wait_s
            return False
        block = self._books.begin_move_of_newest() if newest else self._books.begin_move(tier)
        if block is None:
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
        if self._looks_after_move:
            self._looked_at, self._looks_after_move = None, False
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
        for what, store in (*self._copied.items(), *self._copied_points.items()):
            end = store.blocks[-1]
            assert end.state is not SlotState.HELD, f"{what} still waits to be copied"


def _last_nodes(node: Node, count: int) -> list[Node]:
    path: list[Node] = []
    at: Node | None = node
    while at is not None and len(path) < count:
        path.append(at)
        at = at.parent
    return path[::-1]
