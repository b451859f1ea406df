"""The books record which slot of which tier holds which block, and decide which block leaves to make room.

    slot \\ event   claim    written   write failed   read begins, ends   evicted   digest differs, I/O error
    FREE           WRITING  -         -              -                   -         -
    WRITING        -        HELD      FREE           -                   -         FREE once it has ended
    HELD           -        -         -              busy +1, -1         FREE      BAD
    BAD            -        FREE once the last use of it has ended; no new use begins

Tiers are ordered, the nearest first. A block is in one place. When its tier needs room it moves down a
tier, leaves first, and from the last tier it is dropped. It takes no slot there of what was used after it.

Rule 1 (closure): a block's parent is in some tier too, or it is a first block. So what is found of a prefix
        begins at its start. A block is dropped only after its children; where one is bad, its descendants are
        dropped with it. An orphan is a block that an earlier process left without its parent, which was in
        memory that is gone. It waits for the parent to be written again, and is the first to be dropped when
        room is needed.
Rule 2: a slot is free, or holds one block, or is the target of one move, or has an orphan.
Rule 3: a slot that is being read, written or moved is neither freed nor written anew.
Rule 4: a use of a block is a use of its ancestors, so children are older than their parents.

A checkpoint is a chain of such "blocks", its parts, below the block at whose end it lies (slot_spans.py). It
counts as held once its last part is, and whoever needs room drops all of its parts at once.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from services.kv.block_hash import BlockLedger
from services.kv.tiers.block import Block, Place, SlotState, gives_way, is_idle, whole
from services.kv.tiers.records import LateTier, SlotKind, Stored, unplaced_path
from services.kv.tiers.tier_keys import ROOT
from services.kv.tiers.use_order import MOST_LOOKED_AT, UseOrder
from services.values.errors import ProtocolError
from services.values.kv import NO_EVENTS, BlockHash, CacheEvents

_MOST_DOWN = 1 << 32  # More than a tier has slots; a record has 56 bits for a block's number.


class TierBooks:
    def __init__(self, num_slots: Sequence[int], in_files: Sequence[bool] = ()) -> None:
        """A tier that is opened later has no slots at first."""
        self._num_slots = list(num_slots)
        self.in_files = tuple(in_files) or (False,) * len(self._num_slots)
        self._told, self._told_of_files, self._told_of_points = BlockLedger(), BlockLedger(), BlockLedger()
        self._free = [list(range(count - 1, -1, -1)) for count in num_slots]
        self._blocks: dict[bytes, Block] = {}
        # These are the blocks of tier 0, the nearest one, the least recently used first.
        self._nearest: OrderedDict[Block, None] = OrderedDict()
        self._farther = [UseOrder[Block]() for _ in num_slots[1:]]
        self._orphans: list[dict[int, Stored]] = [{} for _ in num_slots]  # Rule 1 explains them.
        self._orphans_of: dict[bytes, list[Place]] = {}  # Some were dropped since. The key is the parent's.
        self._leaving: set[Block] = set()  # They are BAD, and their slots are still in use.
        self._late: deque[tuple[int, Stored]] = deque()  # Records that were found late, by tier.
        self._sequence = 0
        self._next_down: int | None = None
        self._uses = 0
        self._num_writing = 0

    def __repr__(self) -> str:
        return f"TierBooks(blocks={len(self._blocks)} free={[len(slots) for slots in self._free]})"

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def num_slots(self) -> Sequence[int]:
        return self._num_slots

    @property
    def num_held(self) -> int:
        return len(self._blocks) - self._num_writing

    def free_slots(self, tier: int) -> int:
        return len(self._free[tier]) + len(self._orphans[tier])

    @property
    def num_blocks(self) -> int:
        return sum(block.kind is SlotKind.BLOCK for block in self._blocks.values())

    @property
    def num_points(self) -> int:
        return sum(block.kind is SlotKind.END for block in self._blocks.values())

    @property
    def has_events(self) -> bool:
        return bool(self._told or self._told_of_files or self._told_of_points)

    def take_events(self) -> CacheEvents:
        """Return what is held, what of that is in files, and where checkpoints are, as changes since the last
        call."""
        if not self.has_events:  # This holds after most steps.
            return NO_EVENTS
        (stored, removed), points = self._told.take(), self._told_of_points.take()
        return CacheEvents(stored, removed, False, *points, *self._told_of_files.take())

    def load(self, stored: Sequence[Iterable[Stored]]) -> None:
        """Take over the records of an earlier process, given by tier, into empty books.

        Of two records with the same key the later one counts.
        """
        placed = [(each, tier) for tier, records in enumerate(stored) for each in records]
        placed.sort(key=lambda pair: pair[0].sequence)
        newest = {each.key: (each, tier) for each, tier in placed}
        taken: list[set[int]] = [set() for _ in self._num_slots]
        for key in newest:
            for each, tier in unplaced_path(key, newest, self._blocks):
                block = self._place(each, Place(tier, each.slot))
                taken[tier].add(block.place.slot)
        self._order(reversed(newest))
        for order in self._farther:
            order.rebuild()
        for key, (each, tier) in newest.items():
            self._sequence = max(self._sequence, each.sequence)
            if key not in self._blocks:
                taken[tier].add(each.slot)
                self._orphans[tier][each.slot] = each
                self._orphans_of.setdefault(each.parent_key, []).append(Place(tier, each.slot))
        self._free = [
            [slot for slot in reversed(range(count)) if slot not in used]
            for count, used in zip(self._num_slots, taken, strict=True)
        ]

    def open_tier(self, late: LateTier) -> None:
        """Give a tier its slots while the books are in use. Its records are taken over by `take_in`."""
        tier, free, stored = late
        assert not self._num_slots[tier], f"tier {tier} is open already"
        self._num_slots[tier] = len(free) + len(stored)
        self._free[tier] = free
        self._late += stored
        self._sequence = max(self._sequence, *(each.sequence for _, each in stored[-1:]), 0)
        if self._next_down is not None:
            self.number_down(True)

    @property
    def has_late(self) -> bool:
        return bool(self._late)

    @property
    def is_behind(self) -> bool:
        """Return whether a move may have found nothing only because a tier's order is not known yet."""
        return any(order.is_behind for order in self._farther)

    def put_in_order(self) -> None:
        for order in self._farther:
            if order.is_behind:
                order.first(lambda block: True)

    def take_in(self, most: int) -> None:
        """Take over some of the records that were found late, as the least recently used blocks."""
        for _ in range(min(most, len(self._late))):
            tier, each = self._late.popleft()
            self._orphans[tier][each.slot] = each
            self._orphans_of.setdefault(each.parent_key, []).append(Place(tier, each.slot))
            parent = self._blocks.get(each.parent_key)
            if each.parent_key == ROOT or (parent is not None and parent.state is SlotState.HELD):
                self._adopt(each.parent_key)

    def _place(self, stored: Stored, place: Place) -> Block:
        parent = self._blocks.get(stored.parent_key)
        told = (stored.block_hash, place, stored.sequence, stored.kind, stored.with_draft)
        block = Block(stored.key, parent, *told, SlotState.HELD, stored.digest)
        self._add(block)
        self._tell(block, held=True)
        return block

    def _adopt(self, key: bytes) -> None:
        """Add the orphans of this block, and in turn theirs, as the least recently used blocks."""
        keys = [key]
        for each in keys:  # The list grows meanwhile.
            for place in self._orphans_of.pop(each, ()):
                stored = self._orphans[place.tier].pop(place.slot, None)
                if stored is None or stored.key in self._blocks:
                    self._free[place.tier] += [] if stored is None else [place.slot]
                    continue
                block = self._place(stored, place)
                if place.tier == 0:
                    self._nearest.move_to_end(block, last=False)
                keys.append(block.key)

    def _order(self, keys: Iterable[bytes]) -> None:
        """Order all blocks by use as if each key, the most recent first, had been used with its ancestors."""
        placed: set[Block] = set()
        for age, key in enumerate(keys):
            path: list[Block] = []
            at = self._blocks.get(key)
            while at is not None and at not in placed:
                path.append(at)
                at = at.parent
            placed.update(path)
            for block in reversed(path):
                block.used = -age
                if block.place.tier == 0:
                    self._nearest.move_to_end(block, last=False)

    def find(self, keys: Iterable[bytes]) -> list[Block]:
        """Return the held blocks of these keys, up to the first key without one. This counts as no use."""
        found: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.state is not SlotState.HELD:
                break
            found.append(block)
        return found

    def use(self, block: Block) -> None:
        self._uses += 1
        at: Block | None = block
        while at is not None:
            if at.place.tier == 0:
                self._nearest.move_to_end(at)
            at.used = self._uses
            at = at.parent

    def claim(
        self,
        key: bytes,
        parent_key: bytes,
        block_hash: int,
        kind: SlotKind = SlotKind.BLOCK,
        *,
        with_draft: bool = False,
    ) -> Block | None:
        """Allocate a slot of the first tier for a block that is to be written.

        This counts as a use of the block alone. The caller calls `use` once, for the last block that it
        claims in a row, because `use` costs the length of the path.

        Returns:
            None if the block is here already, its parent is not, or there is no room.
        """
        parent = self._blocks.get(parent_key)
        if key in self._blocks or (parent is None and parent_key != ROOT):
            return None
        slot = self._take(0, lambda other: not other.children and other is not parent, parent)
        if slot is None:
            return None
        block = Block(key, parent, block_hash, Place(0, slot), self._number(), kind, with_draft, busy=1)
        block.used = self._uses = self._uses + 1
        self._num_writing += 1
        self._add(block)
        return block

    def number_down(self, down: bool) -> None:
        """Number what is claimed from now on as if it came in reverse, or else in the order in which it does.

        So a later life takes what is claimed first for the most recently used. What is claimed afterwards has
        higher numbers in any case.
        """
        if down:
            self._sequence += _MOST_DOWN
        self._next_down = self._sequence if down else None

    def _number(self) -> int:
        if self._next_down is None:
            self._sequence += 1
            return self._sequence
        self._next_down -= 1
        return self._next_down

    def written(self, block: Block, digest: int) -> None:
        block.digest = digest
        if block.state is SlotState.WRITING:
            block.state = SlotState.HELD
            self._num_writing -= 1
            self._tell(block, held=True)
            self._adopt(block.key)
        self._unbusy(block)

    def write_failed(self, block: Block) -> None:
        self.drop(block)
        self._unbusy(block)

    def begin_read(self, block: Block) -> None:
        if block.state is not SlotState.HELD:
            raise ProtocolError(f"{block} cannot be read")
        block.busy += 1

    def end_read(self, block: Block, *, good: bool = True) -> None:
        if not good:
            self.drop(block)
        self._unbusy(block)

    def begin_move(self, tier: int) -> Block | None:
        """Begin to move the least recently used leaf of a tier down to the next one.

        Returns:
            None if there is no next tier, no such block, or no room.
        """
        block = self._first(tier, self._may_move) if tier + 1 < len(self._num_slots) else None
        return block if block is not None and self._moves_down(block) else None

    def begin_move_of_newest(self) -> Block | None:
        """Begin to move the most recently used block of the nearest tier whose parent has left it or is about
        to.

        So a tier that is about to end leaves whole prefixes below, however many of its blocks get there.
        Returns None as `begin_move` does.
        """
        newest = islice(reversed(self._nearest), MOST_LOOKED_AT) if self._farther else ()
        block = next(filter(self._may_move_before_its_children, newest), None)
        return block if block is not None and self._moves_down(block) else None

    def _moves_down(self, block: Block) -> bool:
        tier = block.place.tier + 1
        slot = self._take(tier, lambda other: gives_way(other, block), block, block.used)
        if slot is None:
            return False
        block.moves_to = Place(tier, slot)
        block.busy += 1
        return True

    def moved(self, block: Block, *, good: bool = True) -> None:
        """Note the end of a move. A block that is being read meanwhile stays where it is."""
        target, block.moves_to = block.moves_to, None
        assert target is not None
        if good and block.state is SlotState.HELD and block.busy == 1:
            self._leave_tier(block)
            changes = self.in_files[target.tier] != self.in_files[block.place.tier]
            if changes and block.kind is SlotKind.BLOCK:
                self._told_of_files.note(BlockHash(block.block_hash), stored=self.in_files[target.tier])
            target, block.place = block.place, target
            self._enter_tier(block)
        self._free[target.tier].append(target.slot)
        self._unbusy(block)

    def drop(self, block: Block) -> None:
        """Drop a block and all its descendants. A slot in use is freed when its last use has ended."""
        if block.state is SlotState.BAD:
            return
        falling = [block]
        for each in falling:  # The list grows meanwhile: a path may be longer than Python's recursion limit.
            falling.extend(each.children)
        for each in reversed(falling):
            self._remove(each)
            each.state = SlotState.BAD
            if each.busy:
                self._leaving.add(each)
            else:
                self._free[each.place.tier].append(each.place.slot)

    def check(self) -> None:
        unused = [[*free, *waiting] for free, waiting in zip(self._free, self._orphans, strict=True)]
        places = [Place(tier, slot) for tier, slots in enumerate(unused) for slot in slots]
        places += [Place(tier, each.slot) for tier, each in self._late]
        for block in self._all():
            places += [block.place] if block.moves_to is None else [block.place, block.moves_to]
        due = [Place(tier, slot) for tier, count in enumerate(self._num_slots) for slot in range(count)]
        assert sorted(places) == due, f"slots are lost, or in two places: {sorted(places)}"
        for key, block in self._blocks.items():
            self._check_block(key, block)
        num_writing = sum(block.state is SlotState.WRITING for block in self._blocks.values())
        assert num_writing == self._num_writing, f"{num_writing} are written, {self._num_writing} are counted"
        for block in self._leaving:
            assert block.state is SlotState.BAD and block.busy > 0, f"{block} should be free"

    def _check_block(self, key: bytes, block: Block) -> None:
        assert block.key == key and block.state is not SlotState.BAD, f"{block} stands in the wrong place"
        tier = block.place.tier
        in_order = block in (self._farther[tier - 1] if tier else self._nearest)
        assert in_order, f"{block} can never go"
        parent = block.parent
        if parent is not None:
            assert self._blocks.get(parent.key) is parent, f"{block} has no parent here"
            assert block in parent.children, f"{parent} does not know {block}"

    def _all(self) -> Iterable[Block]:
        return (*self._blocks.values(), *self._leaving)

    def _add(self, block: Block) -> None:
        self._blocks[block.key] = block
        self._enter_tier(block)
        if block.parent is not None:
            block.parent.children.add(block)

    def _tell(self, block: Block, *, held: bool) -> None:
        block_hash = BlockHash(block.block_hash)
        if block.kind is SlotKind.END:
            self._told_of_points.note(block_hash, stored=held)
        if block.kind is not SlotKind.BLOCK:
            return
        self._told.note(block_hash, stored=held)
        if self.in_files[block.place.tier]:
            self._told_of_files.note(block_hash, stored=held)

    def _remove(self, block: Block) -> None:
        self._num_writing -= block.state is SlotState.WRITING
        if block.state is SlotState.HELD:
            self._tell(block, held=False)
        del self._blocks[block.key]
        self._leave_tier(block)
        if block.parent is not None:
            block.parent.children.discard(block)

    def _enter_tier(self, block: Block) -> None:
        if block.place.tier:
            self._farther[block.place.tier - 1].add(block)
        else:
            self._nearest[block] = None

    def _leave_tier(self, block: Block) -> None:
        if block.place.tier:
            self._farther[block.place.tier - 1].remove(block)
        else:
            del self._nearest[block]

    def _take(
        self, tier: int, may_go: Callable[[Block], bool], spared: Block | None, used: float = math.inf
    ) -> int | None:
        """Allocate a slot of a tier, if need be by dropping an orphan or else a block that may go, and that
        was not used after `used`. `spared` and its ancestors stay. None if nothing can go.
        """
        if not self._free[tier] and self._orphans[tier]:
            slot = next(iter(self._orphans[tier]))
            del self._orphans[tier][slot]
            return slot
        if not self._free[tier]:
            block = self._first(tier, lambda other: is_idle(other) and may_go(other), used)
            if block is not None:
                self.drop(whole(block, spared))
        return self._free[tier].pop() if self._free[tier] else None

    def _first(self, tier: int, may_go: Callable[[Block], bool], used: float = math.inf) -> Block | None:
        """Return the least recently used block of a tier that may go.

        Children are older than their parents, so it is nearly always the first. Where the next tier is off,
        all may be parents of its blocks, and to look at each of them would take too long.
        """
        if tier:
            return self._farther[tier - 1].first(may_go, used)
        return next(filter(may_go, islice(self._nearest, MOST_LOOKED_AT)), None)

    def _may_move(self, block: Block) -> bool:
        tier = block.place.tier
        return is_idle(block) and all(child.place.tier != tier for child in block.children)

    def _may_move_before_its_children(self, block: Block) -> bool:
        parent = block.parent
        goes_before = parent is None or parent.place.tier != block.place.tier or parent.moves_to is not None
        return is_idle(block) and goes_before

    def _unbusy(self, block: Block) -> None:
        block.busy -= 1
        if block in self._leaving and not block.busy:
            self._leaving.remove(block)
            self._free[block.place.tier].append(block.place.slot)
