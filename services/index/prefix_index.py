"""Which rank holds which index blocks, in memory. Pure.

Sequence hashes make a set prefix-closed: a radix tree holds block i of a sequence only together with
all blocks before it. Therefore the longest match can be found by binary search over depth: about 13
look-ups for 8,192 blocks. While a delta of many parts is only half applied, or after `correct` cut a
block on which other sequences stand, the property may not hold; then a match is too short or too long.
That is no worse than any stale entry: the index is a hint, and decode matches its own tree again.
"""

from collections.abc import Iterable, Sequence

from services.kv.types import Generation, RankId, RankKey


class _RankBlocks:
    """What one life of a rank holds."""

    __slots__ = ("generation", "hashes")

    def __init__(self, generation: Generation, hashes: set[int]) -> None:
        self.generation = generation
        self.hashes = hashes


class PrefixIndex:
    """Per rank, the sequence hashes of its present life. About 77 bytes an entry."""

    def __init__(self) -> None:
        self._ranks: dict[RankKey, _RankBlocks] = {}

    def __repr__(self) -> str:
        return f"PrefixIndex({ {str(key): len(blocks.hashes) for key, blocks in self._ranks.items()} })"

    def generation(self, key: RankKey) -> Generation | None:
        """Of the life whose blocks are held; None: nothing is known of the rank."""
        blocks = self._ranks.get(key)
        return blocks.generation if blocks else None

    def num_blocks(self, key: RankKey) -> int:
        blocks = self._ranks.get(key)
        return len(blocks.hashes) if blocks else 0

    def holds(self, key: RankKey, block: int) -> bool:
        blocks = self._ranks.get(key)
        return blocks is not None and block in blocks.hashes

    @property
    def total_blocks(self) -> int:
        return sum(len(blocks.hashes) for blocks in self._ranks.values())

    def apply_snapshot(self, rank: RankId, hashes: Iterable[int]) -> None:
        """The rank holds exactly these; whatever was known of this or another life is forgotten."""
        self.take_snapshot(rank, set(hashes))

    def take_snapshot(self, rank: RankId, hashes: set[int]) -> None:
        """The same at once, however many they are: the set is the index's from now on."""
        self._ranks[rank.key] = _RankBlocks(rank.generation, hashes)

    def apply_delta(self, rank: RankId, added: Iterable[int], removed: Iterable[int]) -> bool:
        """False, and nothing changes: this life of the rank has no snapshot here."""
        blocks = self._ranks.get(rank.key)
        if blocks is None or blocks.generation != rank.generation:
            return False
        blocks.hashes.difference_update(removed)
        blocks.hashes.update(added)
        return True

    def remove_rank(self, key: RankKey) -> None:
        self._ranks.pop(key, None)

    def correct(self, key: RankKey, hashes: Sequence[int], present_depth: int) -> int:
        """The rank said that of this sequence it holds `present_depth` blocks: forget those beyond.

        Call it with the blocks that were believed present when the request was sent. Blocks that the
        rank holds and we did not know are not added: their eviction may have been told already.
        Returns how many were forgotten.
        """
        blocks = self._ranks.get(key)
        if blocks is None:
            return 0
        before = len(blocks.hashes)
        blocks.hashes.difference_update(hashes[present_depth:])
        return before - len(blocks.hashes)

    def match(self, key: RankKey, hashes: Sequence[int]) -> int:
        """How many leading blocks of the sequence the rank holds."""
        blocks = self._ranks.get(key)
        return _depth(blocks.hashes, hashes) if blocks else 0

    def match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        """`match` for every rank; ranks that hold nothing of the sequence are left out."""
        if not hashes:
            return {}
        first = hashes[0]
        return {
            key: _depth(blocks.hashes, hashes)
            for key, blocks in self._ranks.items()
            if first in blocks.hashes
        }


def _depth(held: set[int], hashes: Sequence[int]) -> int:
    low, high = 0, len(hashes)  # hashes[:low] are held, hashes[high:] are not
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
