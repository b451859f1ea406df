"""Ranks can go on computing at the end of these blocks, where they kept windows' tails and states.

They are few, and no rank has all before one that it has. So they are looked up the other way round: which of
a prompt's blocks are anybody's, and whose. All is in memory and pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.values.rank import RankKey

_NOBODY: frozenset[RankKey] = frozenset()
_MAX_SHARED = 1 << 14


class ResumableBlocks:
    """Each rank has a set of sequence hashes, and each hash its ranks. An entry takes about 140 bytes.

    Most blocks are one rank's or the same few ranks', so blocks share their set of ranks.
    """

    def __init__(self) -> None:
        self._blocks: dict[RankKey, set[int]] = {}
        self._ranks: dict[int, frozenset[RankKey]] = {}
        self._shared: dict[frozenset[RankKey], frozenset[RankKey]] = {}  # It holds the values of `_ranks`.

    def __len__(self) -> int:
        """Return how many there are over all ranks."""
        return sum(map(len, self._blocks.values()))

    def num_blocks(self, key: RankKey) -> int:
        return len(self._blocks.get(key, ()))

    def add(self, key: RankKey, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks.setdefault(key, set()).add(block)
            self._ranks[block] = self._share(self._ranks.get(block, _NOBODY) | {key})

    def remove(self, key: RankKey, blocks: Iterable[int]) -> int:
        """Remove the blocks, and return how many of them were there."""
        known = self._blocks.get(key)
        if known is None:
            return 0
        gone = known.intersection(blocks)
        known -= gone
        if not known:
            del self._blocks[key]
        for block in gone:
            if ranks := self._ranks[block] - {key}:
                self._ranks[block] = self._share(ranks)
            else:
                del self._ranks[block]
        return len(gone)

    def _share(self, ranks: frozenset[RankKey]) -> frozenset[RankKey]:
        """Return an equal set, as a rule the one that other blocks have."""
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()  # Nobody may have many of them any more.
        return self._shared.setdefault(ranks, ranks)

    def changes(self, key: RankKey, blocks: AbstractSet[int]) -> tuple[AbstractSet[int], AbstractSet[int]]:
        """Return what to remove and what to add, until the rank's are these."""
        known = self._blocks.get(key, set())
        return known - blocks, blocks - known

    def remove_rank(self, key: RankKey) -> None:
        self.remove(key, tuple(self._blocks.get(key, ())))

    def along(self, hashes: Sequence[int]) -> Iterator[tuple[int, frozenset[RankKey]]]:
        """Yield those of a sequence, deepest first: how many of its blocks lie before, and the ranks."""
        if not self._ranks:
            return
        for depth in range(len(hashes), 0, -1):
            if (ranks := self._ranks.get(hashes[depth - 1])) is not None:
                yield depth, ranks

    def deepest(self, hashes: Sequence[int], most: Mapping[RankKey, int]) -> dict[RankKey, int]:
        """Return each rank's deepest one of the sequence within `most` blocks; ranks that have none are left
        out."""
        return deepest(self.along(hashes), most)


def deepest(
    along: Iterable[tuple[int, AbstractSet[RankKey]]], most: Mapping[RankKey, int]
) -> dict[RankKey, int]:
    """Return `ResumableBlocks.deepest` of what its `along` yields, or of guesses in the same form."""
    found: dict[RankKey, int] = {}
    for depth, ranks in along:
        for key in ranks & most.keys():
            if depth <= most[key]:
                found.setdefault(key, depth)
        if len(found) == len(most):
            break
    return found
