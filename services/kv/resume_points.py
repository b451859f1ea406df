"""A rank can go on computing from checkpoints: states and tails, kept beside nodes of the radix tree.

    attention's pages   [ block | block | block | block | block )    h: as far as they match
    checkpoints                   *               *                  r: the deepest one at or above h

A sequence's computing is cut into scans, and at borders of which it keeps a checkpoint. A point saves what
would be computed to come to it from the next one above. It is evicted by what it saves, how often, for the
bytes it holds, and how long ago it was of use: GreedyDual-Size-Frequency (Cherkasova 1998); Marconi (arXiv
2411.19379) weighs much the same way. It dies with its node.

    a conversation   * ------ * ------ *             who went on to the next point does not come back
    a branch         * --+--- *                      the next prompt that begins so goes on from the first
                         +--- *

So a point that has been passed is worth what others make of it, and one below which two have gone their ways
is kept for a third.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import gcd
from typing import Generic, Protocol, TypeVar

from services.kv.block_hash import BlockLedger
from services.kv.radix_tree import Node
from services.values.kv import PageId

_MOST_SCANNED = 64  # Delta nets scan as many tokens, and Mamba-2 takes longer with more.


def scan_tokens(index_block: int) -> int:
    """Return how many tokens of a prompt recurrent layers compute at once: from a multiple of it to the next.

    The length of a scan decides how it rounds. So it must follow from the prompt: neither from what else a
    step computes, nor from where the sequence went on, which is a border of the index.
    """
    return gcd(index_block, _MOST_SCANNED)


def scans(start: int, end: int, tokens: int) -> Iterator[range]:
    """Cut [start, end) at multiples of `tokens`."""
    while start < end:
        border = min(end, (start // tokens + 1) * tokens)
        yield range(start, border)
        start = border


def borders_to_keep(resumed: int, matched: int, num_tokens: int, block: int, stride: int) -> list[int]:
    """Return ascending positions, all beyond `resumed`:

    the last border of the ids     the next turn of the conversation goes on from there
    where `matched` ends           another prompt has branched off there, and a third one may
    about every `stride` tokens    a long prompt is not computed from its start by who shares half of it
    """
    last, stride = (num_tokens - 1) // block * block, -(-stride // block) * block
    borders = {last, *range(stride, last, stride)}
    if matched > resumed:
        borders.add(matched // block * block)
    return sorted(border for border in borders if border > resumed)


def shared_border(ids: Sequence[int], other: Sequence[int], block: int, known: int = 0) -> int:
    """Return the last border up to which both are the same, and after which each has at least one more id.

    Up to the border `known` they are known to be.
    """
    end = (min(len(ids), len(other)) - 1) // block * block
    border = known
    while border < end and ids[border : border + block] == other[border : border + block]:
        border += block
    return border


class Valued(Protocol):
    @property
    def worth(self) -> float: ...


T = TypeVar("T", bound=Valued)

_STALE = 64  # So many entries out of date are not worth a tidying.


class EvictionOrder(Generic[T]):
    """The first that was added goes first of equals. A worth may rise unsaid; `sink` must be called where it
    falls.

    Each has one entry in force, with the worth it had then: no more than it has now.
    """

    def __init__(self) -> None:
        self._in_force: dict[T, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, T]] = []  # It has those in force, and others.
        self._serials = count()

    def add(self, item: T) -> None:
        self._push(item, next(self._serials))

    def sink(self, item: T) -> None:
        """Note that it may be worth less than before."""
        worth, serial = self._in_force[item]
        if item.worth < worth:
            self._push(item, serial)

    def remove(self, item: T) -> None:
        del self._in_force[item]
        if len(self._heap) > 2 * len(self._in_force) + _STALE:
            self._heap = [(*entry, item) for item, entry in self._in_force.items()]
            heapify(self._heap)

    def least(self) -> T | None:
        while self._heap:
            worth, serial, item = self._heap[0]
            in_force = self._in_force.get(item) == (worth, serial)
            if in_force and item.worth == worth:
                return item
            heappop(self._heap)
            if in_force:
                self._push(item, serial)
        return None

    def check(self) -> None:
        """Raises AssertionError where somebody is not found in time."""
        entries = set(self._heap)
        for item, (worth, serial) in self._in_force.items():
            assert worth <= item.worth, f"{item} is worth {item.worth} and stands at {worth}"
            assert (worth, serial, item) in entries, f"{item} has no entry"

    def _push(self, item: T, serial: int) -> None:
        self._in_force[item] = (item.worth, serial)
        heappush(self._heap, (item.worth, serial, item))


@dataclass(frozen=True, slots=True, eq=False)
class SavedPoint:
    """It is what is needed to go on at `position`: one hold on each of its units."""

    position: int  # It counts tokens, a multiple of the index block.
    slot: PageId | None  # It is None where nothing is recurrent.
    tails: tuple[tuple[PageId, ...], ...]  # They are by windowed group, from its tail's first page on.


@dataclass(slots=True, eq=False)
class _KeptPoint:
    node: Node
    point: SavedPoint
    size_bytes: int
    above: "_KeptPoint | None" = field(repr=False)  # It is the next one above.
    below: "set[_KeptPoint]" = field(repr=False)  # This one is the next above them.
    age: float  # It is the store's when it was last of use.
    uses: int = 1  # It is expected to be of so many, as far as what is past tells.
    passed: bool = False  # There has been a checkpoint below it.

    def pass_by(self, resumed: int) -> None:
        """Note that who went on from `resumed` has a checkpoint below: a use that it was kept for is past."""
        if not self.passed:
            past = 2 if resumed == self.point.position else 1
            self.passed, self.uses = True, max(0, self.uses - past)

    @property
    def worth(self) -> float:
        above = self.above.point.position if self.above is not None else 0
        return self.age + self.uses * (self.point.position - above) / self.size_bytes

    def put_between(self) -> None:
        for lower in self.below:
            lower.above = self
        if self.above is not None:
            self.above.below -= self.below
            self.above.below.add(self)

    def take_out(self) -> None:
        for lower in self.below:
            lower.above = self.above
        if self.above is not None:
            self.above.below.remove(self)
            self.above.below |= self.below


@dataclass(slots=True)
class ResumePoints:
    """There is at most one a node. `drop` is called with each that is let go of."""

    drop: Callable[[SavedPoint], None]
    events: BlockLedger = field(default_factory=BlockLedger)
    _kept: dict[Node, _KeptPoint] = field(default_factory=dict)
    _order: EvictionOrder[_KeptPoint] = field(default_factory=EvictionOrder)
    evictions: int = 0
    _age: float = 0.0  # It is the worth of what was evicted last.

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SavedPoint]:
        return (kept.point for kept in self._kept.values())

    def keep(self, node: Node, point: SavedPoint, size_bytes: int, resumed: int = 0) -> None:
        """Let sequences go on at `node` from now on. A node that has a checkpoint keeps that one.

        `resumed` is the position that the sequence itself went on from, in tokens.
        """
        if (kept := self._kept.get(node)) is not None:
            self._touch(kept)
            self.drop(point)
            return
        above, below = self._kept_above(node), set(self._nearest_below(node))
        kept = _KeptPoint(node, point, size_bytes, above, below, self._age, passed=bool(below))
        self._kept[node], node.resumable = kept, True
        kept.put_between()
        self._order.add(kept)
        if above is not None:
            above.pass_by(resumed)
            self._order.sink(above)
        for lower in below:
            self._order.sink(lower)
        if node.block_hash is not None:
            self.events.note(node.block_hash, stored=True)

    def deepest(self, node: Node | None) -> SavedPoint | None:
        """Return the deepest checkpoint on the path down to `node`, without a use."""
        kept = self._deepest(node)
        return kept.point if kept is not None else None

    def use(self, node: Node | None) -> SavedPoint | None:
        """Return what `deepest` does, and count it as a use."""
        kept = self._deepest(node)
        if kept is None:
            return None
        self._touch(kept)
        return kept.point

    def evict(self, spared: SavedPoint | None = None) -> bool:
        """Let go of the one that is worth least, but for `spared`; return False where there is none."""
        if (least := self._least(spared)) is None:
            return False
        self._age = max(self._age, least.worth)
        self.evictions += 1
        self.forget(least.node)
        return True

    def forget(self, node: Node) -> None:
        """Drop the node's checkpoint, evicted or with its node."""
        gone = self._kept.pop(node)
        node.resumable = False
        gone.take_out()
        self._order.remove(gone)
        if node.block_hash is not None:
            self.events.note(node.block_hash, stored=False)
        self.drop(gone.point)

    def check(self) -> None:
        """Raises AssertionError where one is at a node that does not know of it, or its worth is wrong."""
        for node, kept in self._kept.items():
            assert node.resumable, f"{node} has a resume point and does not know"
            assert kept.above is self._kept_above(node), f"{node}: {kept.above} is not the next one above"
            assert kept.below == set(self._nearest_below(node)), f"{node}: {kept.below} are not those below"
        self._order.check()

    def _least(self, spared: SavedPoint | None) -> _KeptPoint | None:
        least = self._order.least()
        if least is None or least.point is not spared:
            return least
        self._order.remove(least)
        another = self._order.least()
        self._order.add(least)
        return another

    def _touch(self, kept: _KeptPoint) -> None:
        kept.uses += 1
        kept.age = self._age

    def _kept_above(self, node: Node) -> _KeptPoint | None:
        return self._deepest(node.parent)

    def _deepest(self, node: Node | None) -> _KeptPoint | None:
        while node is not None and not node.resumable:
            node = node.parent
        return self._kept[node] if node is not None else None

    def _nearest_below(self, node: Node) -> Iterator[_KeptPoint]:
        """Yield those next below. It costs the pages down to them: nothing where nobody has gone on from
        `node`."""
        stack = list(node.children.values())
        while stack:
            lower = stack.pop()
            if lower.resumable:
                yield self._kept[lower]
            else:
                stack.extend(lower.children.values())
