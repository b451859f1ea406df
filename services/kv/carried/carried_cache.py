"""The one owner of a rank's tails and states: what each sequence holds of them, and the resume points.

    unit:      free --take--> a sequence's --save, keep--> a resume point's too --last one drops--> free
                                   \\--quarantine--> quarantined --end_quarantine--> free

    sequence:  resume | receive --> extend, trim, save (any number of times) --> close
                                                                      \\-> quarantine --> end_quarantine

Rule 1: for each open sequence so much of each pool is set aside as it can ever hold. So it always gets what
        it needs: resume points are evicted for it, never another sequence.
Rule 2: a page of a tail that a resume point holds lies before the point, whole, and is never written again.
Rule 3: a state is written by one sequence alone. Whoever else wants it has a copy in another slot.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.kv.carried.pool_sizes import units_of_a_sequence
from services.kv.carried.resume_points import ResumePoints, SavedPoint
from services.kv.carried.unit_pool import UnitPool
from services.kv.radix_tree import Node
from services.kv.tails import tail_pages
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout, PageBooks, PageId
from services.values.load import CarriedPool


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
    """One sequence's hold. Everybody may read it; only CarriedCache writes it."""

    position: int  # that it goes on at: a resume point's, or 0
    slot: PageId | None
    tails: list[Tail]  # by windowed group
    resumed: int = 0  # the resume point that it went on from last
    saved: SavedPoint | None = None
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Pool:
    index: int  # of the group in the layout's `carried`
    group: KvGroup
    units: UnitPool
    reserve: int  # units set aside for each open sequence


class CarriedCache:
    """Without carried groups every page border is a resume point, and nothing is held."""

    def __init__(
        self,
        layout: KvLayout,
        num_units: Sequence[int],
        *,
        index_block: int = 64,
        chunk_size: int = 512,
        copy_slot: Callable[[int, int], None] = lambda source, target: None,
    ) -> None:
        """`num_units` are those of each carried group's pool; steps compute up to `chunk_size` tokens.

        Raises ConfigError where a pool cannot hold what one sequence needs.
        """
        self._page_size = layout.page_size
        self.index_block = index_block
        self._copy_slot = copy_slot
        self._pools = [
            _Pool(
                index,
                group,
                UnitPool(units),
                units_of_a_sequence(group, layout.page_size, chunk_size, index_block),
            )
            for index, (group, units) in enumerate(zip(layout.carried, num_units, strict=True))
        ]
        for pool in self._pools:
            _require_room(pool)
        self._windowed = [pool for pool in self._pools if pool.group.kind.is_windowed]
        recurrent = [pool for pool in self._pools if pool.group.kind is GroupKind.RECURRENT]
        self._recurrent = recurrent[0] if recurrent else None
        self._sequences: set[SequenceCarried] = set()
        self.points = ResumePoints(self._drop_point)

    def __repr__(self) -> str:
        return f"CarriedCache({self._pools} open={len(self._sequences)} points={len(self.points)})"

    @property
    def is_empty(self) -> bool:
        """Nothing is carried."""
        return not self._pools

    @property
    def num_open(self) -> int:
        """Sequences neither closed nor in quarantine."""
        return sum(not seq.quarantined for seq in self._sequences)

    def may_open(self) -> bool:
        """Whether there is room for one more sequence."""
        count = len(self._sequences) + 1
        return all(count * pool.reserve <= pool.units.num_units for pool in self._pools)

    def resumable(self, node: Node | None, matched: int) -> int:
        """Where a sequence that matched `matched` tokens, down to `node`, would go on; not a use."""
        if not self._pools:
            return matched
        point = self.points.deepest(node)
        return point.position if point is not None else 0

    # -- a sequence -------------------------------------------------------------------------------

    def resume(self, node: Node | None, matched: int) -> SequenceCarried:
        """Begin a sequence that computes from the deepest resume point down to `node`."""
        if not self._pools:
            return self._opened(SequenceCarried(matched, None, []))
        seq = self._opened(SequenceCarried(0, None, [Tail() for _ in self._windowed]))
        try:
            if self._recurrent is not None:
                seq.slot = self._take(self._recurrent, 1)[0]
            self._go_to(seq, self.points.use(node))
        except BaseException:
            self._end(seq)
            raise
        return seq

    def receive(self, prompt_len: int) -> SequenceCarried:
        """Begin a sequence whose tails and state at `prompt_len` somebody else writes."""
        seq = SequenceCarried(prompt_len, None, [])
        for pool in self._windowed:
            pages = tail_pages(pool.group, prompt_len, self._page_size)
            seq.tails.append(Tail(self._first_page(pool, prompt_len), self._take(pool, len(pages))))
        if self._recurrent is not None:
            seq.slot = self._take(self._recurrent, 1)[0]
        return self._opened(seq)

    def advance(self, seq: SequenceCarried, node: Node | None) -> bool:
        """Jump to a resume point beyond `seq.position`, if there is one down to `node`.

        `seq.position` must be what it has computed. True: `seq.position` is the point's.
        """
        point = self.points.deepest(node)
        if point is None or point.position <= seq.position:
            return False
        self._go_to(seq, self.points.use(node))
        return True

    def extend(self, seq: SequenceCarried, end: int) -> None:
        """Have pages in its tails for all positions before `end`."""
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            missing = -(-end // self._page_size) - tail.end_page
            if missing > 0:
                tail.pages += self._take(pool, missing)

    def skip(self, seq: SequenceCarried, position: int) -> None:
        """It goes on at `position`, whatever is in its units: for who only tries that."""
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            pool.units.drop(tail.pages)
            tail.first_page, tail.pages = self._first_page(pool, position), []

    def trim(self, seq: SequenceCarried, position: int) -> None:
        """It is at `position`: let go of pages that no window reaches any more."""
        seq.position = position
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            first = self._first_page(pool, position)
            gone = max(0, min(first, tail.end_page) - tail.first_page)
            pool.units.drop(tail.pages[:gone])
            del tail.pages[:gone]
            tail.first_page = max(tail.first_page, first)

    def units_of(self, seq: SequenceCarried) -> tuple[tuple[PageId, ...], ...]:
        """What is carried at `seq.position`, by group, in token order."""
        units: list[tuple[PageId, ...]] = [()] * len(self._pools)
        for pool, tail in zip(self._windowed, seq.tails, strict=True):
            carried = tail_pages(pool.group, seq.position, self._page_size)
            first = carried.start - tail.first_page
            units[pool.index] = tuple(tail.pages[first : first + len(carried)]) if carried else ()
        if self._recurrent is not None and seq.slot is not None:
            units[self._recurrent.index] = (seq.slot,)
        return tuple(units)

    # -- resume points ----------------------------------------------------------------------------

    def note_border(self, seq: SequenceCarried) -> None:
        """It stands on a border, trimmed, and will go on: keep what is needed to come back to it."""
        if self._pools:
            saved, seq.saved = seq.saved, None
            if saved is not None:
                self._drop_point(saved)
            seq.saved = self._save(seq)

    def keep_border(self, seq: SequenceCarried, node: Node) -> None:
        """The border that was noted last, at `node`, becomes a resume point."""
        point, seq.saved = seq.saved, None
        if point is not None:
            self.points.keep(node, point, self._size_bytes(point), seq.resumed)

    def close(self, seq: SequenceCarried) -> None:
        """Give everything back. Raises ProtocolError: it is not open."""
        self._require(seq, quarantined=False)
        self._end(seq)

    def quarantine(self, seq: SequenceCarried) -> None:
        """Give it up while a writer may still write its units."""
        self._require(seq, quarantined=False)
        seq.quarantined = True

    def end_quarantine(self, seq: SequenceCarried) -> None:
        self._require(seq, quarantined=True)
        self._end(seq)

    def pools(self) -> tuple[CarriedPool, ...]:
        """How full each is; O(1)."""
        return tuple(
            CarriedPool(1 + pool.index, pool.group.kind.value, pool.units.num_units, pool.units.free_units)
            for pool in self._pools
        )

    def clear(self) -> None:
        """Evict every resume point."""
        while self.points.evict():
            pass

    def books(self) -> tuple[PageBooks, ...]:
        """Of each carried group's pool. Walks all units."""
        return tuple(self._books_of(pool) for pool in self._pools)

    def check(self) -> tuple[PageBooks, ...]:
        """Walk every unit and return the books.

        Raises:
            AssertionError: a unit's holders are not those that hold it, or a sequence holds too much.
        """
        for pool in self._pools:
            held = Counter(unit for units in self._holdings(pool) for unit in units)
            for unit in range(pool.units.num_units):
                counted = pool.units.holders_of(unit)
                assert held[PageId(unit)] == counted, (
                    f"{pool.group.kind}: unit {unit} is held {held[PageId(unit)]} times, counted {counted}"
                )
            for seq in self._sequences:
                own = len(set(self._units_of_sequence(pool, seq)))
                assert own <= pool.reserve, f"{pool.group.kind}: a sequence holds {own} of {pool.reserve}"
        self.points.check()
        books = self.books()
        assert all(of_pool.balanced for of_pool in books), f"the books do not balance: {books}"
        return books

    # ---------------------------------------------------------------------------------------------

    def _opened(self, seq: SequenceCarried) -> SequenceCarried:
        self._sequences.add(seq)
        return seq

    def _go_to(self, seq: SequenceCarried, point: SavedPoint | None) -> None:
        """Hold what the point holds, instead of what it has of tails; the state is a copy."""
        if point is None:
            return
        seq.position = seq.resumed = point.position
        self._hold(point.tails)
        for pool, tail, pages in zip(self._windowed, seq.tails, point.tails, strict=True):
            pool.units.drop(tail.pages)
            tail.pages = list(pages)
            tail.first_page = self._first_page(pool, point.position)
        if point.slot is not None and seq.slot is not None:
            self._copy_slot(point.slot, seq.slot)

    def _first_page(self, pool: _Pool, position: int) -> int:
        """Of the tail at `position`; where that is empty, of what comes next."""
        pages = tail_pages(pool.group, position, self._page_size)
        return pages.start if pages else position // self._page_size

    def _hold(self, tails: Sequence[Sequence[PageId]]) -> None:
        for pool, pages in zip(self._windowed, tails, strict=True):
            pool.units.share(pages)

    def _save(self, seq: SequenceCarried) -> SavedPoint:
        slot = None
        if self._recurrent is not None and seq.slot is not None:
            slot = self._take(self._recurrent, 1)[0]
            try:
                self._copy_slot(seq.slot, slot)
            except BaseException:
                self._recurrent.units.drop([slot])
                raise
        tails = tuple(tuple(tail.pages) for tail in seq.tails)
        self._hold(tails)
        return SavedPoint(seq.position, slot, tails)

    def _take(self, pool: _Pool, num_units: int) -> list[PageId]:
        """Evicts resume points where units are short; by Rule 1 that is enough."""
        while pool.units.free_units < num_units and self.points.evict():
            pass
        return pool.units.take(num_units)

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
        if seq.saved is not None:
            self._drop_point(seq.saved)
            seq.saved = None
        for pool, tail in zip(self._windowed, seq.tails, strict=False):
            pool.units.drop(tail.pages)
            tail.pages = []
        if self._recurrent is not None and seq.slot is not None:
            self._recurrent.units.drop([seq.slot])
            seq.slot = None
        self._sequences.remove(seq)

    def _require(self, seq: SequenceCarried, *, quarantined: bool) -> None:
        if seq not in self._sequences or seq.quarantined is not quarantined:
            raise ProtocolError(f"not {'quarantined' if quarantined else 'open'}: {seq}")

    def _holdings(self, pool: _Pool) -> list[list[PageId]]:
        points = [self._units_of_point(pool, point) for point in self.points]
        return points + [self._units_of_sequence(pool, seq) for seq in self._sequences]

    def _units_of_sequence(self, pool: _Pool, seq: SequenceCarried) -> list[PageId]:
        saved = self._units_of_point(pool, seq.saved) if seq.saved is not None else []
        if pool is self._recurrent:
            return saved + ([seq.slot] if seq.slot is not None else [])
        return saved + (seq.tails[self._windowed.index(pool)].pages if seq.tails else [])

    def _units_of_point(self, pool: _Pool, point: SavedPoint) -> list[PageId]:
        if pool is self._recurrent:
            return [point.slot] if point.slot is not None else []
        return list(point.tails[self._windowed.index(pool)])

    def _books_of(self, pool: _Pool) -> PageBooks:
        of_points = {unit for point in self.points for unit in self._units_of_point(pool, point)}
        quarantined: set[PageId] = set()
        of_sequences: set[PageId] = set()
        for seq in self._sequences:
            (quarantined if seq.quarantined else of_sequences).update(self._units_of_sequence(pool, seq))
        return PageBooks(
            total=pool.units.num_units,
            free=pool.units.free_units,
            cached=len(of_points - of_sequences - quarantined),
            locked=len(of_points & of_sequences),
            private=len(of_sequences - of_points),
            quarantined=len(quarantined - of_sequences),
        )


def _require_room(pool: _Pool) -> None:
    if pool.units.num_units < pool.reserve:
        raise ConfigError(
            f"a pool of {pool.units.num_units} units for {pool.group.kind.value} layers does not hold one "
            f"sequence, which needs up to {pool.reserve}"
        )
