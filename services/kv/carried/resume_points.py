"""Where a rank can go on computing: states and tails, kept beside nodes of the radix tree.

    attention's pages   [ block | block | block | block | block )    h: as far as they match
    resume points                 *               *                  r: the deepest one at or above h

A point saves what would be computed to come to it from the next one above. It is evicted by what it saves,
how often, for the bytes it holds, and how long ago it was of use: GreedyDual-Size-Frequency (Cherkasova
1998); Marconi (arXiv 2411.19379) weighs much the same way. It dies with its node.

    a conversation   * ------ * ------ *             who went on to the next point does not come back
    a branch         * --+--- *                      the next prompt that begins so goes on from the first
                         +--- *

So a point that has been passed is worth what others make of it, and one below which two have gone their ways
is kept for a third.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.kv.cache_events import BlockLedger
from services.kv.radix_tree import Node
from services.values.kv import PageId


@dataclass(frozen=True, slots=True, eq=False)
class SavedPoint:
    """What is needed to go on at `position`: one hold on each of its units."""

    position: int  # tokens, a multiple of the index block
    slot: PageId | None  # None: nothing is recurrent
    tails: tuple[tuple[PageId, ...], ...]  # by windowed group, from its tail's first page on


@dataclass(slots=True, eq=False)
class _KeptPoint:
    node: Node
    point: SavedPoint
    size_bytes: int
    above: int  # tokens at the next point above
    age: float  # of the store when it was last of use
    uses: int = 1  # that it is expected to be of, as far as what is past tells
    passed: bool = False  # there has been a point below it

    def pass_by(self, resumed: int) -> None:
        """Who went on from `resumed` has a point below: one that it was kept for, or used for, is past."""
        if not self.passed:
            past = 2 if resumed == self.point.position else 1
            self.passed, self.uses = True, max(0, self.uses - past)

    @property
    def worth(self) -> float:
        return self.age + self.uses * (self.point.position - self.above) / self.size_bytes


@dataclass(slots=True)
class ResumePoints:
    """At most one a node. `drop` is told of each that is let go of."""

    drop: Callable[[SavedPoint], None]
    events: BlockLedger = field(default_factory=BlockLedger)
    _kept: dict[Node, _KeptPoint] = field(default_factory=dict)
    evictions: int = 0
    _age: float = 0.0  # the worth of what was evicted last

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SavedPoint]:
        return (kept.point for kept in self._kept.values())

    def keep(self, node: Node, point: SavedPoint, size_bytes: int, resumed: int = 0) -> None:
        """From now on sequences may go on at `node`. A node that has a point keeps that one.

        `resumed`: the position that the sequence itself went on from.
        """
        if (kept := self._kept.get(node)) is not None:
            self._touch(kept)
            self.drop(point)
            return
        kept_above = self._kept_above(node)
        above = kept_above.point.position if kept_above is not None else 0
        kept = self._kept[node] = _KeptPoint(node, point, size_bytes, above, self._age)
        node.resumable = True
        for other in self._below(point.position, above):
            if other.node is not node and _is_above(node, other.node):
                other.above, kept.passed = point.position, True
        if kept_above is not None:
            kept_above.pass_by(resumed)
        if node.block_hash is not None:
            self.events.note(node.block_hash, stored=True)

    def deepest(self, node: Node | None) -> SavedPoint | None:
        """The deepest point on the path down to `node`; not a use."""
        kept = self._deepest(node)
        return kept.point if kept is not None else None

    def use(self, node: Node | None) -> SavedPoint | None:
        """As `deepest`, and it counts as a use."""
        kept = self._deepest(node)
        if kept is None:
            return None
        self._touch(kept)
        return kept.point

    def evict(self) -> bool:
        """Let go of the one that is worth least; False: there is none."""
        if not self._kept:
            return False
        least = min(self._kept.values(), key=lambda kept: kept.worth)
        self._age = max(self._age, least.worth)
        self.evictions += 1
        self.forget(least.node)
        return True

    def forget(self, node: Node) -> None:
        """The node's point is gone, evicted or with its node."""
        gone = self._kept.pop(node)
        node.resumable = False
        for other in self._kept.values():
            if other.above == gone.point.position and _is_above(node, other.node):
                other.above = gone.above
        if node.block_hash is not None:
            self.events.note(node.block_hash, stored=False)
        self.drop(gone.point)

    def check(self) -> None:
        """Raises AssertionError: a point is at a node that does not know of it, or its worth is wrong."""
        for node, kept in self._kept.items():
            assert node.resumable, f"{node} has a resume point and does not know"
            kept_above = self._kept_above(node)
            above = kept_above.point.position if kept_above is not None else 0
            assert kept.above == above, f"{node}: the next point above is at {above}, not {kept.above}"

    def _touch(self, kept: _KeptPoint) -> None:
        kept.uses += 1
        kept.age = self._age

    def _kept_above(self, node: Node) -> _KeptPoint | None:
        return self._deepest(node.parent)

    def _deepest(self, node: Node | None) -> _KeptPoint | None:
        while node is not None and not node.resumable:
            node = node.parent
        return self._kept[node] if node is not None else None

    def _below(self, position: int, above: int) -> list[_KeptPoint]:
        """Those that may have a point at `position` above them now, where they had one at `above`."""
        kept = self._kept.values()
        return [other for other in kept if other.above == above and other.point.position > position]


def _is_above(node: Node, lower: Node | None) -> bool:
    while lower is not None and lower.depth > node.depth:
        lower = lower.parent
    return lower is node
