"""Which rank holds which index blocks, in memory. Pure.

Sequence hashes make a set prefix-closed: a radix tree holds block i of a sequence only together with
all blocks before it. Therefore the longest match can be found by binary search over depth: about 13
look-ups for 8,192 blocks. Each goes to memory that no cache holds; so where many ranks may hold the
first block, a filter says how deep each can be at most, and mostly one look-up shows that it is right.

While a delta of many parts is only half applied, or after `correct` cut a block on which other sequences
stand, the property may not hold; then a match is too short or too long. That is no worse than any stale
entry: the index is a hint, and decode matches its own tree again.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from services.index.read.holder_filter import HolderFilter
from services.index.read.resumable_blocks import ResumableBlocks
from services.values.rank import Generation, RankId, RankKey

_FEW_RANKS = 16  # may hold it: their sets are searched at once
# So many of the first blocks go through the filter, where system prompts end, and as many of all the others,
# evenly; between two of those the rank's set is searched.
_DENSE_BLOCKS = 64


class PrefixIndex:
    """Per rank, the sequence hashes of its present life. 84 to 140 bytes an entry.

    `resume_points` are those of ranks that tell them: all others can go on computing wherever they hold.
    """

    def __init__(self) -> None:
        # Two tables, so that a look-up finds the set without an object on the way there.
        self._blocks: dict[RankKey, set[int]] = {}
        self._generations: dict[RankKey, Generation] = {}  # of the life that holds them
        self.total_blocks = 0  # kept up, for every rank's snapshot asks for it
        self.resume_points = ResumableBlocks()
        self._filter = HolderFilter()
        self._columns: dict[RankKey, int] = {}  # of the filter
        self._by_column: dict[int, tuple[RankKey, set[int]]] = {}

    def __repr__(self) -> str:
        return f"PrefixIndex({ {str(key): len(blocks) for key, blocks in self._blocks.items()} })"

    def generation(self, key: RankKey) -> Generation | None:
        """Of the life whose blocks are held; None: nothing is known of the rank."""
        return self._generations.get(key)

    def num_blocks(self, key: RankKey) -> int:
        return len(self._blocks.get(key, ()))

    def holders_of(self, ranks: Iterable[RankKey], block: int) -> Iterator[RankKey]:
        """Those of `ranks` that hold the block, as they come."""
        known = self._blocks
        return (key for key in ranks if block in known.get(key, ()))

    def holders(self, block: int, most: int) -> list[RankKey] | None:
        """The ranks that hold the block, in no order; None where more than `most` may."""
        columns = self._filter.holders(block, most)
        if columns is None:
            return None
        seeming = (self._by_column[column] for column in columns)
        return [key for key, blocks in seeming if block in blocks]

    def apply_snapshot(self, rank: RankId, hashes: Iterable[int], resumable: Iterable[int] = ()) -> None:
        """The rank holds exactly these; whatever was known of this or another life is forgotten."""
        self.take_snapshot(rank, set(hashes))
        self.resume_points.remove_rank(rank.key)
        self.resume_points.add(rank.key, resumable)

    def take_snapshot(self, rank: RankId, hashes: set[int], packed: Collection[int] | None = None) -> None:
        """The same of a set, which is the index's from now on, but for the resume points: they take so much
        longer that the caller changes them, in slices. `packed`: the same hashes once more, where they are at
        hand: the filter reads them ten times as fast as out of a set.

        Of a life that is known the set stays the same object, so that one frozen for the garbage collector
        (see garbage.py) stays so.
        """
        key, known = rank.key, self._blocks.get(rank.key)
        self.total_blocks += len(hashes) - len(known or ())
        if known is None or self._generations[key] != rank.generation:
            self._blocks[key], self._generations[key] = hashes, rank.generation
        else:
            known.clear()
            known.update(hashes)  # into an empty set: no more than a copy of the table
        self._fill_column(key, packed)

    def _fill_column(self, key: RankKey, packed: Collection[int] | None) -> None:
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = self._filter.take_column()
        blocks = self._blocks[key]
        self._by_column[column] = key, blocks
        self._filter.fill(column, blocks if packed is None else packed, self.total_blocks)

    def apply_delta(
        self,
        rank: RankId,
        added: Collection[int],
        removed: Collection[int],
        resumable_added: Iterable[int] = (),
        resumable_removed: Iterable[int] = (),
    ) -> bool:
        """False, and nothing changes: this life of the rank has no snapshot here."""
        key = rank.key
        if self._generations.get(key) != rank.generation:
            return False
        blocks = self._blocks[key]
        before = len(blocks)
        blocks.difference_update(removed)
        blocks.update(added)
        self.total_blocks += len(blocks) - before
        self.resume_points.remove(key, removed)
        self.resume_points.remove(key, resumable_removed)
        self.resume_points.add(key, resumable_added)
        self._filter.add(self._columns[key], added)
        return True

    def remove_rank(self, key: RankKey) -> None:
        self.resume_points.remove_rank(key)
        self.total_blocks -= len(self._blocks.pop(key, ()))
        self._generations.pop(key, None)
        column = self._columns.pop(key, None)
        if column is not None:
            self._filter.give_column(column)
            del self._by_column[column]

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
        self.resume_points.remove(key, hashes[present_depth:])
        self.total_blocks -= before - len(blocks)
        return before - len(blocks)

    def match(self, key: RankKey, hashes: Sequence[int]) -> int:
        """How many leading blocks of the sequence the rank holds."""
        blocks = self._blocks.get(key)
        if not blocks or not hashes or hashes[0] not in blocks:
            return 0
        return _depth(blocks, hashes, 1, len(hashes), len(hashes))

    def match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        """`match` for every rank; ranks that hold nothing of the sequence are left out."""
        if not hashes:
            return {}
        seeming = self._filter.holders(hashes[0], _FEW_RANKS)
        return self._match_all(hashes) if seeming is None else self._match_some(seeming, hashes)

    def _match_some(self, columns: list[int], hashes: Sequence[int]) -> dict[RankKey, int]:
        depths: dict[RankKey, int] = {}
        last = len(hashes)
        for column in columns:
            key, blocks = self._by_column[column]
            if hashes[0] in blocks:
                # Mostly as deep as on the rank before: all hold the same system prompt, few the rest.
                depths[key] = last = _depth(blocks, hashes, 1, len(hashes), last)
        return depths

    def _match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        depths: dict[RankKey, int] = {}
        total = last = len(hashes)
        step = max(1, -(-(total - _DENSE_BLOCKS) // _DENSE_BLOCKS))
        dense = total if step == 1 else _DENSE_BLOCKS
        seeming = self._filter.depths([*hashes[:dense], *hashes[dense::step]])
        for column, (key, blocks) in self._by_column.items():
            sampled = seeming[column]
            if sampled <= dense:
                if not sampled:
                    continue
                if hashes[sampled - 1] in blocks:
                    depths[key] = last = sampled
                    continue
                last = _depth(blocks, hashes, 0, sampled - 1, sampled - 1)
            else:
                deepest = dense + (sampled - 1 - dense) * step
                if hashes[deepest] in blocks:
                    last = _depth(blocks, hashes, deepest + 1, min(deepest + step, total), last)
                else:
                    last = _depth(blocks, hashes, 0, deepest, deepest)
            if last:
                depths[key] = last
        return depths


def _depth(held: set[int], hashes: Sequence[int], least: int, most: int, guess: int) -> int:
    """How many leading blocks are held: `least` to `most`. A right guess costs two look-ups at most."""
    if least < guess <= most:
        if hashes[guess - 1] not in held:
            most = guess - 1
        elif guess == most or hashes[guess] not in held:
            return guess
        else:
            least = guess + 1
    while least < most:
        middle = (least + most) // 2
        if hashes[middle] in held:
            least = middle + 1
        else:
            most = middle
    return least
