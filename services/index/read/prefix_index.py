"""This knows in memory which rank holds which index blocks. All is pure.

Sequence hashes make a set prefix-closed: a radix tree holds block i of a sequence only together with all
blocks before it. So of a long prompt some blocks are looked up, and further ones where their holders differ.

While a delta of many parts is only half applied, or after `correct` cut a block on which other sequences
stand, the property may not hold; then a match is too short or too long. That is no worse than any stale
entry: the index is a hint, and decode matches its own tree again.

Deltas wait until somebody asks, or until there are many: all at once cost little more than one.

At the end of resumable blocks ranks can go on computing: they kept windows' tails and states there. Such
blocks are few, and no rank has all before one that it has. So they are looked up the other way round: which
of a prompt's blocks are anybody's, and whose.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from services.index.read.block_holders import BlockHolders, Run, columns_of, packed
from services.index.read.hash_table import PackedHashes
from services.values.rank import Generation, RankId, RankKey

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


_MOST_WAITING = 4096  # So many blocks take about a millisecond.


class Held:
    """This says who holds how much of one prompt, for as long as nothing changes."""

    __slots__ = ("_columns", "_keys", "_runs")

    def __init__(self, runs: list[Run], columns: dict[RankKey, int], keys: dict[int, RankKey]) -> None:
        self._runs, self._columns, self._keys = runs, columns, keys

    def depth(self, key: RankKey) -> int:
        """Return how many leading blocks the rank holds."""
        if not self._runs or (column := self._columns.get(key)) is None:
            return 0
        bit = 1 << column
        for depth, mask in reversed(self._runs):
            if mask & bit:
                return depth
        return 0

    def num_beyond(self, depth: int) -> int:
        """Return how many ranks hold more blocks than that."""
        return self._mask(depth).bit_count()

    def beyond(self, depth: int) -> list[RankKey]:
        """Return those ranks, in no order."""
        return [self._keys[column] for column in columns_of(self._mask(depth))]

    def depths(self) -> dict[RankKey, int]:
        """Return the depths of all that hold any."""
        depths: dict[RankKey, int] = {}
        deeper = 0
        for depth, mask in reversed(self._runs):
            ends = mask ^ deeper
            if ends & (ends - 1):
                depths.update(dict.fromkeys([self._keys[column] for column in columns_of(ends)], depth))
            else:
                depths[self._keys[ends.bit_length() - 1]] = depth
            deeper = mask
        return depths

    def _mask(self, depth: int) -> int:
        return next((mask for deep, mask in self._runs if deep > depth), 0)


class PrefixIndex:
    """Each rank has the sequence hashes of its present incarnation, 20 to 38 bytes a block, however many
    ranks hold it.

    `resume_points` are the checkpoints of ranks that report them: all others can go on computing wherever
    they hold.
    """

    def __init__(self) -> None:
        self.resume_points = ResumableBlocks()
        self._holders = BlockHolders()
        self._generations: dict[RankKey, Generation] = {}  # It is that of the incarnation that holds them.
        self._columns: dict[RankKey, int] = {}
        self._keys: dict[int, RankKey] = {}  # The keys are columns.
        self._waiting: list[tuple[int, bool, PackedHashes]] = []
        self._num_waiting = 0
        self._more: dict[
            int, int
        ] = {}  # By column it has the blocks that wait to be added, less those to be removed.

    def __repr__(self) -> str:
        return f"PrefixIndex({ {str(key): self.num_blocks(key) for key in self._columns} })"

    @property
    def total_blocks(self) -> int:
        """Return the blocks of all ranks together; see `num_blocks`."""
        return sum(map(self.num_blocks, tuple(self._columns)))

    def generation(self, key: RankKey) -> Generation | None:
        """Return the generation whose blocks are held, or None where nothing is known of the rank."""
        return self._generations.get(key)

    def num_blocks(self, key: RankKey) -> int:
        """Return how many blocks a rank holds; what waits is counted as if it changed something. Any thread
        may ask."""
        column = self._columns.get(key)
        return 0 if column is None else self._holders.num_blocks(column) + self._more.get(column, 0)

    # -- snapshots: drafted in parts, seen at once -----------------------------------------------------

    def draft(self) -> int:
        """Return a new snapshot without blocks, to be shown or dropped."""
        return self._holders.take_column()

    def add_to_draft(self, draft: int, hashes: Iterable[int]) -> None:
        blocks = packed(hashes)
        self._holders.change(blocks, np.full(len(blocks), draft), np.ones(len(blocks), np.bool_))

    def show_draft(self, draft: int, rank: RankId) -> None:
        """Let the rank hold exactly this; whatever was known of this or another incarnation is forgotten.

        Its checkpoints stay: they take so long that the caller changes them, in slices.
        """
        key = rank.key
        self._give_column(key)
        self._generations[key] = rank.generation
        self._columns[key], self._keys[draft] = draft, key
        self._holders.show(draft)

    def drop_draft(self, draft: int) -> None:
        self._holders.give_column(draft)

    def take_snapshot(self, rank: RankId, hashes: Iterable[int]) -> None:
        """Take all of a draft at once."""
        draft = self.draft()
        self.add_to_draft(draft, hashes)
        self.show_draft(draft, rank)

    def apply_snapshot(self, rank: RankId, hashes: Iterable[int], resumable: Iterable[int] = ()) -> None:
        """Take a snapshot at once, its checkpoints too."""
        self.take_snapshot(rank, hashes)
        self.resume_points.remove_rank(rank.key)
        self.resume_points.add(rank.key, resumable)

    # -- changes ---------------------------------------------------------------------------------------

    def apply_delta(
        self,
        rank: RankId,
        added: Collection[int],
        removed: Collection[int],
        resumable_added: Iterable[int] = (),
        resumable_removed: Iterable[int] = (),
    ) -> bool:
        """Apply a delta; return False, and change nothing, where this incarnation has no snapshot here."""
        key = rank.key
        if self._generations.get(key) != rank.generation:
            return False
        self._wait(key, removed, is_added=False)
        self._wait(key, added, is_added=True)
        self.resume_points.remove(key, removed)
        self.resume_points.remove(key, resumable_removed)
        self.resume_points.add(key, resumable_added)
        return True

    def _wait(self, key: RankKey, hashes: Collection[int], is_added: bool) -> None:
        if hashes:
            column = self._columns[key]
            self._waiting.append((column, is_added, packed(hashes)))
            self._num_waiting += len(hashes)
            self._more[column] = self._more.get(column, 0) + (len(hashes) if is_added else -len(hashes))
            if self._num_waiting >= _MOST_WAITING:
                self.take_in()

    def take_in(self) -> None:
        """Apply what waits."""
        if waiting := self._waiting:
            self._waiting, self._num_waiting, self._more = [], 0, {}
            columns, is_added, hashes = zip(*waiting, strict=True)
            counts = list(map(len, hashes))
            self._holders.change(
                np.concatenate(hashes),
                np.repeat(np.array(columns), counts),
                np.repeat(np.array(is_added), counts),
            )

    def remove_rank(self, key: RankKey) -> None:
        self.resume_points.remove_rank(key)
        self._generations.pop(key, None)
        self._give_column(key)

    def _give_column(self, key: RankKey) -> None:
        self.take_in()
        if (column := self._columns.pop(key, None)) is not None:
            self._holders.give_column(column)
            del self._keys[column]

    def correct(self, key: RankKey, hashes: Sequence[int], present_depth: int) -> int:
        """Forget the blocks beyond `present_depth`, which the rank said that it holds of this sequence.

        Call it with the blocks that were believed present when the request was sent. Blocks that the rank
        holds and we did not know are not added: their eviction may have been reported already. Returns how
        many were forgotten.
        """
        if key not in self._columns:
            return 0
        self.take_in()
        before, beyond = self.num_blocks(key), hashes[present_depth:]
        self._wait(key, beyond, is_added=False)
        self.take_in()
        self.resume_points.remove(key, beyond)
        return before - self.num_blocks(key)

    # -- look-ups --------------------------------------------------------------------------------------

    def held(self, hashes: Sequence[int]) -> Held:
        """Look up once for all ranks who holds how much of a prompt."""
        self.take_in()
        runs = self._holders.runs(hashes) if hashes else []
        return Held(runs, self._columns, self._keys)

    def match(self, key: RankKey, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of the sequence the rank holds."""
        return self.held(hashes).depth(key)

    def match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        """Return `match` for every rank; ranks that hold nothing of the sequence are left out."""
        return self.held(hashes).depths()
