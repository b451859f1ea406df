"""A rank can resume computing from checkpoints: states and tails, kept beside nodes of the radix tree.

    attention's pages   [ block | block | block | block | block )    h: as far as they match
    checkpoints                   *               *                  r: the deepest one at or above h

Recurrent layers compute a prompt in scans, and a sequence keeps checkpoints at some of the scans' borders. A
checkpoint saves the work of computing up to it from the next checkpoint above. Eviction weighs this saving
and how often it is used against the bytes held and the time since the last use: GreedyDual-Size-Frequency
(Cherkasova 1998); Marconi (arXiv 2411.19379) weighs much the same way. A checkpoint is dropped with its node.

    a conversation   * ------ * ------ *             who went on to the next checkpoint does not come back
    a branch         * --+--- *                      the next prompt that begins so goes on from the first
                         +--- *

So once a sequence has kept a checkpoint further down, the one above counts only the uses that others make of
it. A checkpoint below which two sequences have branched is kept for a third one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count
from math import gcd
from typing import Generic, Protocol, TypeVar

from services.kv.block_hash import BlockLedger
from services.kv.radix_tree import Node
from services.values.kv import PageId

_MOST_SCANNED = 64  # Delta nets scan this many tokens, and Mamba-2 is slower with more.


def scan_tokens(index_block: int) -> int:
    """Return how many tokens recurrent layers compute at once, from one multiple of it to the next.

    The length of a scan decides how results are rounded. So it must depend on the prompt alone: neither on
    what else a step computes, nor on where the sequence was resumed, which is a border of the index.
    """
    return gcd(index_block, _MOST_SCANNED)


def scans(start: int, end: int, tokens: int) -> Iterator[range]:
    while start < end:
        border = min(end, (start // tokens + 1) * tokens)
        yield range(start, border)
        start = border


def borders_to_keep(resumed: int, matched: int, num_tokens: int, block: int, stride: int) -> list[int]:
    """Return the positions, all beyond `resumed` and ascending, at which to keep checkpoints:

    the last border of the ids     the next turn of the conversation resumes there
    where `matched` ends           another prompt has branched off there, and a third one may
    about every `stride` tokens    a prompt that shares half of a long one is not computed from its start
    """
    last, stride = (num_tokens - 1) // block * block, -(-stride // block) * block
    borders = {last, *range(stride, last, stride)}
    if matched > resumed:
        borders.add(matched // block * block)
    return sorted(border for border in borders if border > resumed)


def shared_border(ids: Sequence[int], other: Sequence[int], block: int, known: int = 0) -> int:
    """Return the last border up to which both are equal and after which each has at least one more id.

    The caller knows that they are equal up to the border `known`.
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

_STALE = 64  # So few outdated entries are not worth removing.


class EvictionOrder(Generic[T]):
    """`least` returns the item of least worth; of equals the one that was added first.

    The worth of an item may rise unnoticed, but `sink` must be called when it falls. Each item has one entry
    in force, with its worth at that time, which is no more than its worth now.
    """

    def __init__(self) -> None:
        self._in_force: dict[T, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, T]] = []  # This has the entries in force, and outdated ones.
        self._serials = count()

    def add(self, item: T) -> None:
        self._push(item, next(self._serials))

    def sink(self, item: T) -> None:
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
        entries = set(self._heap)
        for item, (worth, serial) in self._in_force.items():
            assert worth <= item.worth, f"{item} is worth {item.worth} and stands at {worth}"
            assert (worth, serial, item) in entries, f"{item} has no entry"

    def _push(self, item: T, serial: int) -> None:
        self._in_force[item] = (item.worth, serial)
        heappush(self._heap, (item.worth, serial, item))


@dataclass(frozen=True, slots=True, eq=False)
class SavedPoint:
    """This holds what is needed to go on at `position`, with one hold on each of its units."""

    position: int  # This is in tokens, a multiple of the index block.
    slot: PageId | None  # It is None where nothing is recurrent.
    tails: tuple[tuple[PageId, ...], ...]  # These are by windowed group, from the tail's first page on.


@dataclass(slots=True, eq=False)
class _KeptPoint:
    node: Node
    point: SavedPoint
    size_bytes: int
    above: "_KeptPoint | None" = field(repr=False)  # This is the nearest checkpoint above.
    below: "set[_KeptPoint]" = field(repr=False)  # This one is the nearest above each of them.
    age: float  # This was the store's age at the last use.
    uses: int = 1  # So many uses are expected, judged by past ones.
    passed: bool = False  # There is, or was, a checkpoint below it.

    def pass_by(self, resumed: int) -> None:
        """Note that a sequence resumed at `resumed` has a checkpoint below: one expected use is over."""
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
class Checkpoints:
    """There is at most one checkpoint per node. `drop` is called with each one that is removed.

    Before that, `copied_no_more` is called with one that was kept, whose units may have new content soon.
    """

    drop: Callable[[SavedPoint], None]
    copied_no_more: Callable[[SavedPoint], None] = lambda point: None
    events: BlockLedger = field(default_factory=BlockLedger)
    _kept: dict[Node, _KeptPoint] = field(default_factory=dict)
    _order: EvictionOrder[_KeptPoint] = field(default_factory=EvictionOrder)
    evictions: int = 0
    _age: float = 0.0  # This is the worth of what was evicted last.

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SavedPoint]:
        return (kept.point for kept in self._kept.values())

    def keep(self, node: Node, point: SavedPoint, size_bytes: int, resumed: int = 0) -> None:
        """Keep a checkpoint at `node`; if the node has one already, drop the new one.

        `resumed` is the position, in tokens, from which the sequence itself was resumed.
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
        """Return the deepest checkpoint on the path down to `node`. This does not count as a use."""
        kept = self._deepest(node)
        return kept.point if kept is not None else None

    def to_use(self, node: Node | None) -> Iterator[tuple[Node, SavedPoint]]:
        """Yield the checkpoints down to `node` that are expected to be used, the deepest first.

        The last two count as such: the next turn goes on from one, and who asks again from the other.
        """
        kept, place = self._deepest(node), 0
        while kept is not None:
            if kept.uses or place < 2:
                yield kept.node, kept.point
            kept, place = kept.above, place + 1

    def next_to_go(self, most: int) -> list[tuple[Node, SavedPoint]]:
        """Return those of the `most` of least worth that are expected to be used. This counts as no use."""
        least = nsmallest(most, self._kept.values(), key=lambda kept: kept.worth)
        return [(kept.node, kept.point) for kept in least if kept.uses]

    def use(self, node: Node | None) -> SavedPoint | None:
        kept = self._deepest(node)
        if kept is None:
            return None
        self._touch(kept)
        return kept.point

    def evict(self, spared: SavedPoint | None = None) -> bool:
        """Drop the checkpoint of least worth, except `spared`. Return False if there is none."""
        if (least := self._least(spared)) is None:
            return False
        self._age = max(self._age, least.worth)
        self.evictions += 1
        self.forget(least.node)
        return True

    def forget(self, node: Node) -> None:
        gone = self._kept.pop(node)
        node.resumable = False
        gone.take_out()
        self._order.remove(gone)
        if node.block_hash is not None:
            self.events.note(node.block_hash, stored=False)
        self.copied_no_more(gone.point)
        self.drop(gone.point)

    def check(self) -> None:
        for node, kept in self._kept.items():
            assert node.resumable, f"{node} has a checkpoint and does not know"
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
        stack = list(node.children.values())
        while stack:
            lower = stack.pop()
            if lower.resumable:
                yield self._kept[lower]
            else:
                stack.extend(lower.children.values())
