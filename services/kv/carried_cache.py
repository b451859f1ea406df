"""This owns all tails and states of a rank (its per-request state): those of sequences and of checkpoints.

    unit:      free --take--> a sequence's --save, keep--> a checkpoint's too --last holder drops it--> free
                                   \\--quarantine--> quarantined --end_quarantine--> free

    sequence:  resume | receive --> extend, trim, save (any number of times) --> close
                                                                      |\\-> rest --> close
                                                                      \\--> quarantine --> end_quarantine

    grant:     holds a checkpoint's units while others read them --> close

Rule 1: in each pool enough units are set aside for each open sequence to go on by one token, at any position.
        Chunks of more tokens need more; for all of a step together, what one of full size needs is set aside.
        So a sequence always gets the units that it needs: for it checkpoints are evicted first, then what
        other sequences have saved, but never a sequence. A sequence that rests, or is in quarantine, does not
        go on: for it only the units that it holds are set aside.
Rule 2: a page of a tail that a checkpoint holds ends at or before its position, is full, and is never written
        again.
Rule 3: only one sequence writes a state. Any other that needs it has a copy in another slot.

What a sequence has saved at the last border it passed belongs to it alone, and may be dropped for other
sequences: then it leaves no checkpoint when it ends.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.kv.checkpoints import Checkpoints, SavedPoint, scan_tokens
from services.kv.page_allocator import UnitPool
from services.kv.radix_tree import Node
from services.kv.tails import tail_pages, units_of_a_chunk, units_of_a_sequence
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout, PageBooks, PageId
from services.values.rank_reports import CarriedPool


@dataclass(slots=True, eq=False)
class Tail:
    """Page i of `pages` holds the positions of page first_page + i of the sequence."""

    first_page: int = 0
    pages: list[PageId] = field(default_factory=list)

    @property
    def end_page(self) -> int:
        return self.first_page + len(self.pages)


@dataclass(slots=True, eq=False)
class SequenceCarried:
    """This is what one sequence holds of per-request state. All may read it; only CarriedCache writes it."""

    position: int  # The sequence goes on here: a checkpoint's position or 0.
    slot: PageId | None
    tails: list[Tail]  # There is one for each windowed group.
    computes: bool = True  # False means that another rank writes the state at its end.
    resumed: int = 0  # This is the position of the checkpoint that it resumed from last.
    saved: SavedPoint | None = None
    rests: bool = False
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Pool:
    index: int  # This is the group's index in the layout's `carried`.
    group: KvGroup
    units: UnitPool
    of_sequence: int  # So many units are set aside for each open sequence,
    of_chunks: int  # and so many for the chunks of a step beyond those.

    def has_room(self, num_sequences: int, resting_units: int = 0) -> bool:
        set_aside = num_sequences * self.of_sequence + self.of_chunks
        return set_aside + resting_units <= self.units.num_units


class CarriedCache:
    """Every page border is a checkpoint, and nothing is held, if the layout has no per-request state."""

    def __init__(
        self,
        layout: KvLayout,
        num_units: Sequence[int],
        *,
        index_block: int = 64,
        chunk_size: int = 512,
        copy_slot: Callable[[int, int], None] = lambda source, target: None,
    ) -> None:
        """Make pools of `num_units`, one for each group beside full attention, in the layout's order.

        A step computes up to `chunk_size` prompt tokens. `copy_slot` copies one state's slot into another.

        Raises:
            ConfigError: a pool cannot hold what one sequence needs.
        """
        self._page_size = layout.page_size
        self.index_block = index_block
        self._copy_slot = copy_slot
        self._pools = [
            _Pool(
                index,
                group,
                UnitPool(units),
                units_of_a_sequence(group, layout.page_size),
                units_of_a_chunk(group, layout.page_size, chunk_size),
            )
            for index, (group, units) in enumerate(zip(layout.carried, num_units, strict=True))
        ]
        for pool in self._pools:
            _require_room(pool)
        self._windowed = [pool for pool in self._pools if pool.group.kind.is_windowed]
        recurrent = [pool for pool in self._pools if pool.group.kind is GroupKind.RECURRENT]
        self._recurrent = recurrent[0] if recurrent else None
        # These are in the order of their opening.
        self._sequences: dict[SequenceCarried, None] = {}
        self.points = Checkpoints(self._drop_point)

    def __repr__(self) -> str:
        return f"CarriedCache({self._pools} open={len(self._sequences)} points={len(self.points)})"

    @property
    def is_empty(self) -> bool:
        return not self._pools

    @property
    def scan_tokens(self) -> int:
        """Return the multiple at which all chunks but a prompt's last end; 1 without recurrent layers."""
        return scan_tokens(self.index_block) if self._recurrent is not None else 1

    @property
    def num_open(self) -> int:
        return sum(not seq.quarantined for seq in self._sequences)

    def may_open(self, *, computes: bool) -> bool:
        """Return whether there is room for one more sequence.

        While others go on, a sequence that computes counts as two. Otherwise no room for checkpoints would be
        left, and each sequence would compute its whole prompt.
        """
        going_on = any(not seq.rests for seq in self._sequences)
        count = 1 + (computes and going_on) + self._set_aside_for()
        return all(pool.has_room(count, self._resting_units(pool)) for pool in self._pools)

    def resumable(self, node: Node | None, matched: int) -> int:
        """Return where a sequence would resume that matched `matched` tokens, down to `node`.

        This does not count as a use.
        """
        if not self._pools:
            return matched
        point = self.points.deepest(node)
        return point.position if point is not None else 0

    # -- a sequence -------------------------------------------------------------------------------

    def resume(self, node: Node | None, matched: int) -> SequenceCarried:
        """Begin a sequence that computes, from the deepest checkpoint on the path down to `node`."""
        if not self._pools:
            return self._opened(SequenceCarried(matched, None, []))
        seq = self._opened(SequenceCarried(0, None, [Tail() for _ in self._windowed]))
        point = self.points.use(node)
        try:
            if self._recurrent is not None:
                seq.slot = self._slot_beside(self._recurrent, point)
            self._go_to(seq, point)
        except BaseException:
            self._end(seq)
            raise
        if point is not None and point.slot is not None and point.slot == seq.slot:
            self.points.evict()
        return seq

    def receive(self, position: int, *, computes: bool = False) -> SequenceCarried:
        """Begin a sequence whose tails and state at `position` another rank writes."""
        seq = SequenceCarried(position, None, [], computes=computes)
        for pool in self._windowed:
            pages = tail_pages(pool.group, position, self._page_size)
            seq.tails.append(Tail(self._first_page(pool, position), self._take(pool, len(pages))))
        if self._recurrent is not None:
            seq.slot = self._take(self._recurrent, 1)[0]
        return self._opened(seq)

    def grant(self, node: Node | None, matched: int) -> SequenceCarried | None:
        """Hold the units of the deepest checkpoint down to `node`, for other ranks to read.

        Returns:
            None, with nothing held, if there is no checkpoint, or Rule 1 would be broken.
        """
        if not self._pools:
            return self._opened(SequenceCarried(matched, None, [], computes=False, rests=True))
        point, count = self.points.deepest(node), self._set_aside_for()
        if point is None:
            return None
        for pool in self._pools:
            resting = self._resting_units(pool) + len(self._units_of_point(pool, point))
            if not pool.has_room(count, resting):
                return None
        self.points.use(node)
        seq = self._opened(SequenceCarried(point.position, point.slot, [], computes=False, rests=True))
        for pool, pages in zip(self._windowed, point.tails, strict=True):
            seq.tails.append(Tail(self._first_page(pool, point.position), list(pages)))
        self._hold(point.tails)
        if self._recurrent is not None and point.slot is not None:
            self._recurrent.units.share([point.slot])
        return seq

    def hold_nothing(self) -> SequenceCarried:
        return self._opened(SequenceCarried(0, None, [Tail() for _ in self._windowed], rests=True))

    def advance(self, seq: SequenceCarried, node: Node | None) -> bool:
        """Jump to a checkpoint beyond `seq.position`, if there is one on the path down to `node`.

        `seq.position` must be what the sequence has computed.

        Returns:
            True if `seq.position` is the checkpoint's now.
        """
        point = self.points.deepest(node)
        if point is None or point.position <= seq.position:
            return False
        self._go_to(seq, self.points.use(node))
        return True

    def extend(self, seq: SequenceCarried, end: int) -> int:
        """Allocate pages of its tails for all positions before `end`, or for as many as there is room for.

        There is room for at least one more position, whatever other sequences and chunks hold.

        Returns:
            The end of the positions that have pages.
        """
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            if end > (tail.first_page + pool.of_sequence) * self._page_size:
                end = min(end, (tail.first_page + self._most_pages(pool, seq)) * self._page_size)
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            missing = -(-end // self._page_size) - tail.end_page
            if missing > 0:
                tail.pages += self._take(pool, missing)
        return end

    def skip(self, seq: SequenceCarried, position: int) -> None:
        """Move to `position` without valid content, for a trial run whose results are not used."""
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            pool.units.drop(tail.pages)
            tail.first_page, tail.pages = self._first_page(pool, position), []

    def trim(self, seq: SequenceCarried, position: int) -> None:
        """Drop pages that no window reaches any more from `position`, and pages behind it."""
        seq.position = position
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            first = max(tail.first_page, self._first_page(pool, position))
            start, end = first - tail.first_page, -(-position // self._page_size) - tail.first_page
            pool.units.drop(tail.pages[:start] + tail.pages[end:])
            tail.first_page, tail.pages = first, tail.pages[start:end]

    def units_of(self, seq: SequenceCarried) -> tuple[tuple[PageId, ...], ...]:
        """Return the units of the state at `seq.position`, by group, each group's in token order."""
        units: list[tuple[PageId, ...]] = [()] * len(self._pools)
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            carried = tail_pages(pool.group, seq.position, self._page_size)
            first = carried.start - tail.first_page
            units[pool.index] = tuple(tail.pages[first : first + len(carried)]) if carried else ()
        if self._recurrent is not None and seq.slot is not None:
            units[self._recurrent.index] = (seq.slot,)
        return tuple(units)

    def units_of_point(self, point: SavedPoint) -> tuple[tuple[PageId, ...], ...]:
        """Return the units of a checkpoint, by group, each group's in token order."""
        return tuple(tuple(self._units_of_point(pool, point)) for pool in self._pools)

    # -- checkpoints ----------------------------------------------------------------------------

    def note_border(self, seq: SequenceCarried) -> None:
        """Save what is needed to come back to the border at which the trimmed sequence stands; it goes on.

        Nothing is saved if open sequences hold all states.
        """
        if self._pools:
            self._drop_saved(seq)
            seq.saved = self._save(seq)

    def keep_border(self, seq: SequenceCarried, node: Node) -> None:
        """Make what was saved at the last border, which is at `node`, a checkpoint."""
        point, seq.saved = seq.saved, None
        if point is not None:
            self.points.keep(node, point, self._size_bytes(point), seq.resumed)

    def rest(self, seq: SequenceCarried) -> None:
        """Note that the trimmed sequence goes on no more. What it holds may be read until it is closed."""
        self._drop_saved(seq)
        seq.rests = True

    def close(self, seq: SequenceCarried) -> None:
        self._require(seq, quarantined=False)
        self._end(seq)

    def quarantine(self, seq: SequenceCarried) -> None:
        """End the sequence while another rank may still write its units, and keep those from reuse."""
        self._require(seq, quarantined=False)
        self.rest(seq)
        seq.quarantined = True

    def end_quarantine(self, seq: SequenceCarried) -> None:
        self._require(seq, quarantined=True)
        self._end(seq)

    def pools(self) -> tuple[CarriedPool, ...]:
        return tuple(
            CarriedPool(1 + pool.index, pool.group.kind.value, pool.units.num_units, pool.units.free_units)
            for pool in self._pools
        )

    def books(self) -> tuple[PageBooks, ...]:
        return tuple(self._books_of(pool) for pool in self._pools)

    def check(self) -> tuple[PageBooks, ...]:
        """Walk every unit and return the books.

        Raises:
            AssertionError: a count of holders or a hold is wrong, or the books do not balance.
        """
        for pool in self._pools:
            held = Counter(unit for units in self._holdings(pool) for unit in units)
            for unit in range(pool.units.num_units):
                counted = pool.units.holders_of(unit)
                assert held[PageId(unit)] == counted, (
                    f"{pool.group.kind}: unit {unit} is held {held[PageId(unit)]} times, counted {counted}"
                )
            for seq in self._sequences:
                own = len(self._units_of_sequence(pool, seq))
                too_many = f"{pool.group.kind}: a sequence holds {own} of {pool.of_sequence}"
                assert own <= pool.of_sequence, too_many
            going_on = sum(not seq.rests for seq in self._sequences)
            assert pool.has_room(going_on, self._resting_units(pool)), (
                f"{pool.group.kind}: more are open than may be"
            )
        self.points.check()
        books = self.books()
        assert all(of_pool.balanced for of_pool in books), f"the books do not balance: {books}"
        return books

    # ---------------------------------------------------------------------------------------------

    def _opened(self, seq: SequenceCarried) -> SequenceCarried:
        self._sequences[seq] = None
        return seq

    def _go_to(self, seq: SequenceCarried, point: SavedPoint | None) -> None:
        if point is None:
            return
        seq.position = seq.resumed = point.position
        self._hold(point.tails)
        for pool, tail, pages in zip(self._windowed, seq.tails, point.tails, strict=True):
            pool.units.drop(tail.pages)
            tail.pages = list(pages)
            tail.first_page = self._first_page(pool, point.position)
        if point.slot is not None and seq.slot is not None and point.slot != seq.slot:
            self._copy_slot(point.slot, seq.slot)

    def _first_page(self, pool: _Pool, position: int) -> int:
        pages = tail_pages(pool.group, position, self._page_size)
        return pages.start if pages else position // self._page_size

    def _hold(self, tails: Sequence[Sequence[PageId]]) -> None:
        for pool, pages in zip(self._windowed, tails, strict=True):
            pool.units.share(pages)

    def _save(self, seq: SequenceCarried) -> SavedPoint | None:
        slot = None
        if self._recurrent is not None and seq.slot is not None:
            if not self._evict_points(self._recurrent, 1):
                return None
            slot = self._recurrent.units.take(1)[0]
            try:
                self._copy_slot(seq.slot, slot)
            except BaseException:
                self._recurrent.units.drop([slot])
                raise
        tails = tuple(tuple(tail.pages) for tail in seq.tails)
        self._hold(tails)
        return SavedPoint(seq.position, slot, tails)

    def _most_pages(self, pool: _Pool, seq: SequenceCarried) -> int:
        place = self._windowed.index(pool)
        others = [other for other in self._sequences if other is not seq]
        taken = (max(len(o.tails[place].pages), 0 if o.rests else pool.of_sequence) for o in others)
        return pool.units.num_units - sum(taken)

    def _set_aside_for(self) -> int:
        return sum(1 + seq.computes for seq in self._sequences if not seq.rests)

    def _resting_units(self, pool: _Pool) -> int:
        return sum(len(self._units_of_sequence(pool, seq)) for seq in self._sequences if seq.rests)

    def _take(self, pool: _Pool, num_units: int) -> list[PageId]:
        self._make_room(pool, num_units)
        return pool.units.take(num_units)

    def _slot_beside(self, pool: _Pool, point: SavedPoint | None) -> PageId:
        """Return a slot in which to go on from `point`.

        It is the slot of `point` itself, which both hold then, if nothing else can be evicted.
        """
        if self._make_room(pool, 1, spared=point) or point is None or point.slot is None:
            return pool.units.take(1)[0]
        assert pool.units.holders_of(point.slot) == 1, "what is granted is spared by Rule 1"
        pool.units.share([point.slot])
        return point.slot

    def _make_room(self, pool: _Pool, num_units: int, spared: SavedPoint | None = None) -> bool:
        while not (fit := self._evict_points(pool, num_units, spared)) and self._drop_least_saved():
            pass
        return fit

    def _evict_points(self, pool: _Pool, num_units: int, spared: SavedPoint | None = None) -> bool:
        while pool.units.free_units < num_units:
            if not self.points.evict(spared):
                return False
        return True

    def _drop_least_saved(self) -> bool:
        saved = [(seq.saved.position - seq.resumed, seq) for seq in self._sequences if seq.saved is not None]
        if saved:
            self._drop_saved(min(saved, key=lambda each: each[0])[1])
        return bool(saved)

    def _drop_saved(self, seq: SequenceCarried) -> None:
        saved, seq.saved = seq.saved, None
        if saved is not None:
            self._drop_point(saved)

    def _drop_point(self, point: SavedPoint) -> None:
        for pool, pages in zip(self._windowed, point.tails, strict=True):
            pool.units.drop(pages)
        if self._recurrent is not None and point.slot is not None:
            self._recurrent.units.drop([point.slot])

    def _size_bytes(self, point: SavedPoint) -> int:
        sizes = [
            len(pages) * pool.group.unit_bytes
            for pool, pages in zip(self._windowed, point.tails, strict=True)
        ]
        if self._recurrent is not None:
            sizes.append(self._recurrent.group.unit_bytes)
        return max(1, sum(sizes))

    def _end(self, seq: SequenceCarried) -> None:
        self._drop_saved(seq)
        for pool, tail in zip(self._windowed, seq.tails, strict=False):
            pool.units.drop(tail.pages)
            tail.pages = []
        if self._recurrent is not None and seq.slot is not None:
            self._recurrent.units.drop([seq.slot])
            seq.slot = None
        del self._sequences[seq]

    def _require(self, seq: SequenceCarried, *, quarantined: bool) -> None:
        if seq not in self._sequences or seq.quarantined is not quarantined:
            raise ProtocolError(f"not {'quarantined' if quarantined else 'open'}: {seq}")

    def _holdings(self, pool: _Pool) -> list[list[PageId]]:
        saved = [seq.saved for seq in self._sequences if seq.saved is not None]
        points = [self._units_of_point(pool, point) for point in (*self.points, *saved)]
        return points + [self._units_of_sequence(pool, seq) for seq in self._sequences]

    def _units_of_sequence(self, pool: _Pool, seq: SequenceCarried) -> list[PageId]:
        if pool is self._recurrent:
            return [seq.slot] if seq.slot is not None else []
        return list(seq.tails[self._windowed.index(pool)].pages)

    def _units_of_point(self, pool: _Pool, point: SavedPoint) -> list[PageId]:
        if pool is self._recurrent:
            return [point.slot] if point.slot is not None else []
        return list(point.tails[self._windowed.index(pool)])

    def _books_of(self, pool: _Pool) -> PageBooks:
        of_points = {unit for point in self.points for unit in self._units_of_point(pool, point)}
        quarantined: set[PageId] = set()
        of_sequences: set[PageId] = set()
        for seq in self._sequences:
            held = quarantined if seq.quarantined else of_sequences
            held.update(self._units_of_sequence(pool, seq))
            if seq.saved is not None:
                held.update(self._units_of_point(pool, seq.saved))
        return PageBooks(
            total=pool.units.num_units,
            free=pool.units.free_units,
            cached=len(of_points - of_sequences - quarantined),
            locked=len(of_points & of_sequences),
            private=len(of_sequences - of_points),
            quarantined=len(quarantined - of_sequences),
        )


def _require_room(pool: _Pool) -> None:
    if not pool.has_room(1):
        raise ConfigError(
            f"a pool of {pool.units.num_units} units for {pool.group.kind.value} layers does not hold one "
            f"sequence, which needs up to {pool.of_sequence + pool.of_chunks}"
        )
