"""Which rank holds which index blocks, in memory. Pure.

Sequence hashes make a set prefix-closed: a radix tree holds block i of a sequence only together with
all blocks before it. Therefore the longest match can be found by binary search over depth: about 13
look-ups for 8,192 blocks. While a delta of many parts is only half applied, or after `correct` cut a
block on which other sequences stand, the property may not hold; then a match is too short or too long.
That is no worse than any stale entry: the index is a hint, and decode matches its own tree again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from services.kv.types import Generation, RankId, RankKey


class PrefixIndex:
    """Per rank, the sequence hashes of its present life. About 81 bytes an entry."""

    def __init__(self) -> None:
        # Two tables, so that a look-up finds the set without an object on the way there.
        self._blocks: dict[RankKey, set[int]] = {}
        self._generations: dict[RankKey, Generation] = {}  # of the life that holds them

    def __repr__(self) -> str:
        return f"PrefixIndex({ {str(key): len(blocks) for key, blocks in self._blocks.items()} })"

    def generation(self, key: RankKey) -> Generation | None:
        """Of the life whose blocks are held; None: nothing is known of the rank."""
        return self._generations.get(key)

    def num_blocks(self, key: RankKey) -> int:
        return len(self._blocks.get(key, ()))

    def holds(self, key: RankKey, block: int) -> bool:
        return block in self._blocks.get(key, ())

    def first_holder(self, ranks: Iterator[RankKey], block: int) -> RankKey | None:
        """The first of `ranks` that holds the block; they are consumed up to it."""
        known = self._blocks
        return next((key for key in ranks if block in known.get(key, ())), None)

    @property
    def total_blocks(self) -> int:
        return sum(map(len, self._blocks.values()))

    def apply_snapshot(self, rank: RankId, hashes: Iterable[int]) -> None:
        """The rank holds exactly these; whatever was known of this or another life is forgotten."""
        self.take_snapshot(rank, set(hashes))

    def take_snapshot(self, rank: RankId, hashes: set[int]) -> None:
        """The same of a set, which is the index's from now on.

        Of a life that is known only the difference is applied: its set stays the same object, so that one
        frozen for the garbage collector (see router/app.py) stays so.
        """
        key, known = rank.key, self._blocks.get(rank.key)
        if known is None or self._generations[key] != rank.generation:
            self._blocks[key], self._generations[key] = hashes, rank.generation
            return
        gone, news = known - hashes, hashes - known
        known -= gone
        known |= news

    def apply_delta(self, rank: RankId, added: Iterable[int], removed: Iterable[int]) -> bool:
        """False, and nothing changes: this life of the rank has no snapshot here."""
        key = rank.key
        if self._generations.get(key) != rank.generation:
            return False
        blocks = self._blocks[key]
        blocks.difference_update(removed)
        blocks.update(added)
        return True

    def remove_rank(self, key: RankKey) -> None:
        self._blocks.pop(key, None)
        self._generations.pop(key, None)

    def correct(self, key: RankKey, hashes: Sequence[int], present_depth: int) -> int:
        """The rank said that of this sequence it holds `present_depth` blocks: forget those beyond.

        Call it with the blocks that were believed present when the request was sent. Blocks that the
        rank holds and we did not know are not added: their eviction may have been told already.
        Returns how many were forgotten.
        """
        blocks = self._blocks.get(key)
        if blocks is None:
            return 0
        before = len(blocks)
        blocks.difference_update(hashes[present_depth:])
        return before - len(blocks)

    def match(self, key: RankKey, hashes: Sequence[int]) -> int:
        """How many leading blocks of the sequence the rank holds."""
        blocks = self._blocks.get(key)
        return _depth(blocks, hashes[::-1], len(hashes)) if blocks and hashes else 0

    def match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        """`match` for every rank; ranks that hold nothing of the sequence are left out."""
        depths: dict[RankKey, int] = {}
        if not hashes:
            return depths
        first, deepest_first, depth = hashes[0], hashes[::-1], len(hashes)
        for key, blocks in self._blocks.items():
            if first in blocks:
                # Mostly as deep as on the rank before: all hold the same system prompt, few the rest.
                depths[key] = depth = _depth(blocks, deepest_first, depth)
        return depths


def _depth(held: set[int], deepest_first: Sequence[int], guess: int) -> int:
    """How many leading blocks are held; `guess` is 1 or more, and costs two look-ups where it is right."""
    total = len(deepest_first)
    at = total - guess
    # From the deepest block on, those not held come first: what `bisect` takes for sorted.
    if deepest_first[at] not in held:
        return total - bisect_left(deepest_first, True, at + 1, total, key=held.__contains__)
    if at == 0 or deepest_first[at - 1] not in held:
        return guess
    return total - bisect_left(deepest_first, True, 0, at - 1, key=held.__contains__)
