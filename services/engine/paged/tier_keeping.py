"""A rank that leaves decides what of its pool it keeps in a file that may have no room for all of it."""

from collections.abc import Collection, Iterator

from services.engine.paged.tiered_pool import TieredPool
from services.kv.checkpoints import SavedPoint
from services.kv.radix_tree import Node

_Counted = Collection[Node | SavedPoint]


def ends_to_keep(pool: TieredPool, num_slots: int) -> list[Node]:
    """Return the ends of the most recently used paths that fit with their checkpoints, the oldest first.

    So each path is used more recently than those that it may push out. The first one that is too long for the
    slots that are left is shortened.
    """
    left, points_on = num_slots, pool.carried.points.to_use
    counted, ends, shortens = set[Node | SavedPoint](), list[Node](), True
    for leaf in reversed(pool.cache.next_to_go()):
        for end in _ends_on(pool, leaf, left, counted) if shortens else (leaf,):
            points = [point for _, point in points_on(end) if point not in counted]
            nodes = list(_up_to(counted, end))
            needed = len(_borders(pool, nodes)) + sum(pool.num_parts(point.position) for point in points)
            if needed <= left:
                left -= needed
                counted.update(nodes, points)
                ends.append(end)
                break
            shortens = False
        if left == 0:
            break
    return ends[::-1]


def _ends_on(pool: TieredPool, leaf: Node, most: int, counted: _Counted) -> Iterator[Node]:
    """Yield the leaf, and then what is of use of its path where that takes more than `most` slots."""
    end: Node | None = leaf
    while end is not None:
        yield end
        checkpoints = (node for node, _ in pool.carried.points.to_use(end))
        end = next((node for node in checkpoints if node.depth < end.depth), None)
    if pool.carried.is_empty:
        borders = _borders(pool, list(_up_to(counted, leaf)))
        yield from borders[max(0, len(borders) - most) :][:1]


def _borders(pool: TieredPool, nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.depth % pool.block_pages == 0]


def _up_to(counted: _Counted, end: Node) -> Iterator[Node]:
    """Yield the nodes from `end` up to the first one that is counted, or the root; without these two."""
    while end.parent is not None and end not in counted:
        yield end
        end = end.parent
