"""This pure module knows which rank holds which index blocks.

Sequence hashes make a set prefix-closed: a radix tree holds block i of a sequence only together with all
blocks before it. So only some blocks of a long prompt are looked up, and more of them where their holders
differ.

While a delta of many parts is half applied, or after `correct` has removed a block on which other sequences
build, this may not hold; then a match is too short or too long. That is no worse than any stale entry: the
index is a hint, and decode matches its own tree again.

Deltas wait until the next lookup, or until there are many: applying all at once costs little more than one.

At the end of resumable blocks ranks can continue computing, because they kept windows' tails and states
there. Such blocks are few, and a rank need not have those before one that it has. So they are looked up the
other way round: which of a prompt's blocks are resumable on any rank, and on which.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from services.index.read.block_holders import BlockHolders, Run, columns_of, packed
from services.index.read.hash_table import PackedHashes
from services.values.rank import Generation, RankId, RankKey

_NOBODY: frozenset[RankKey] = frozenset()
_MAX_SHARED = 1 << 14


class ResumableBlocks:
    """Each rank has a set of sequence hashes, and each hash its ranks. An entry takes about 140 bytes.

    Most blocks have one rank or the same few ranks, so blocks share these sets.
    """

    def __init__(self) -> None:
        self._blocks: dict[RankKey, set[int]] = {}
        self._ranks: dict[int, frozenset[RankKey]] = {}
        self._shared: dict[frozenset[RankKey], frozenset[RankKey]] = {}  # It has the values of `_ranks`.

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def num_blocks(self, key: RankKey) -> int:
        return len(self._blocks.get(key, ()))

    def add(self, key: RankKey, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks.setdefault(key, set()).add(block)
            self._ranks[block] = self._share(self._ranks.get(block, _NOBODY) | {key})

    def remove(self, key: RankKey, blocks: Iterable[int]) -> int:
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
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()  # Many of them may be unused by now.
        return self._shared.setdefault(ranks, ranks)

    def changes(self, key: RankKey, blocks: AbstractSet[int]) -> tuple[AbstractSet[int], AbstractSet[int]]:
        known = self._blocks.get(key, set())
        return known - blocks, blocks - known

    def remove_rank(self, key: RankKey) -> None:
        self.remove(key, tuple(self._blocks.get(key, ())))

    def along(self, hashes: Sequence[int]) -> Iterator[tuple[int, frozenset[RankKey]]]:
        """Yield the sequence's resumable blocks, deepest first: the depth in blocks, and the ranks."""
        if not self._ranks:
            return
        for depth in range(len(hashes), 0, -1):
            if (ranks := self._ranks.get(hashes[depth - 1])) is not None:
                yield depth, ranks

    def deepest(self, hashes: Sequence[int], most: Mapping[RankKey, int]) -> dict[RankKey, int]:
        """Return for each rank that has one its deepest resumable block within its limit in `most`."""
        return deepest(self.along(hashes), most)


def deepest(
    along: Iterable[tuple[int, AbstractSet[RankKey]]], most: Mapping[RankKey, int]
) -> dict[RankKey, int]:
    found: dict[RankKey, int] = {}
    for depth, ranks in along:
        for key in ranks & most.keys():
            if depth <= most[key]:
                found.setdefault(key, depth)
        if len(found) == len(most):
            break
    return found


_MOST_WAITING = 4096  # Applying this many blocks takes about a millisecond.


class Held:
    """This says which rank holds how much of one prompt, and is valid until the index changes."""

    __slots__ = ("_columns", "_keys", "_runs")

    def __init__(self, runs: list[Run], columns: dict[RankKey, int], keys: dict[int, RankKey]) -> None:
        self._runs, self._columns, self._keys = runs, columns, keys

    def depth(self, key: RankKey) -> int:
        column, blocks = self._columns.get(key), 0
        if column is not None:
            for depth, mask in self._runs:  # Each mask has a part of those in the one before it.
                if not mask >> column & 1:
                    break
                blocks = depth
        return blocks

    @property
    def has_holders(self) -> bool:
        return bool(self._runs)

    def num_beyond(self, depth: int) -> int:
        return self._mask(depth).bit_count()

    def beyond(self, depth: int) -> list[RankKey]:
        return [self._keys[column] for column in columns_of(self._mask(depth))]

    def depths(self) -> dict[RankKey, int]:
        return self._depths(self._runs)

    def _depths(self, runs: list[Run]) -> dict[RankKey, int]:
        depths: dict[RankKey, int] = {}
        deeper = 0
        for depth, mask in reversed(runs):
            ends = mask ^ deeper
            if ends & (ends - 1):
                depths.update(dict.fromkeys([self._keys[column] for column in columns_of(ends)], depth))
            else:
                depths[self._keys[ends.bit_length() - 1]] = depth
            deeper = mask
        return depths

    def deepest(self) -> Iterator[tuple[RankKey, int]]:
        """Yield one after the other who holds the most and how many blocks, then who holds less."""
        deeper = 0
        for depth, mask in reversed(self._runs):
            ends = mask ^ deeper
            while ends:
                lowest = ends & -ends
                ends ^= lowest
                yield self._keys[lowest.bit_length() - 1], depth
            deeper = mask

    def _mask(self, depth: int) -> int:
        return next((mask for deep, mask in self._runs if deep > depth), 0)


_FEW_HOLDERS = 8


class HeldBelow(Held):
    """This says the same of what lies below the pools, and which of it lies in files."""

    __slots__ = ("_file_columns", "_file_keys", "_layers", "_length", "checkpoints", "few", "rest")

    def __init__(
        self,
        runs: list[Run],
        columns: dict[RankKey, int],
        keys: dict[int, RankKey],
        layers: list[Run],
        file_columns: dict[RankKey, int],
        file_keys: dict[int, RankKey],
        checkpoints: ResumableBlocks,
        length: int,
    ) -> None:
        """`length` is that of the prompt in blocks."""
        self._runs, self._columns, self._keys = runs, columns, keys
        self._layers, self._file_columns, self.checkpoints = layers, file_columns, checkpoints
        self._file_keys, self._length = file_keys, length
        # What lies behind a system prompt is kept by few ranks. All others hold at most so many blocks.
        self.rest = max((depth for depth, mask in runs if mask.bit_count() > _FEW_HOLDERS), default=0)
        self.few = self._depths([run for run in runs if run[0] > self.rest])

    def in_files(self, key: RankKey, first: int, end: int) -> int:
        """Return how many of the blocks from `first` to `end`, all of which the rank holds, lie in files."""
        column = self._file_columns.get(key)
        if column is None:
            return 0
        bit, num_blocks = 1 << column, 0
        for start, mask in reversed(self._layers):
            if start < end and mask & bit:
                num_blocks += end - max(start, first)
            end = min(end, start)
            if start <= first:
                break
        return num_blocks

    def files_by_group(self, groups: Mapping[RankKey, str]) -> dict[str, int]:
        """Return by group of ranks which of their files hold any of the prompt's blocks, for `reach`."""
        anywhere, files = 0, dict[str, int]()
        for _, mask in self._layers:
            anywhere |= mask
        for column in columns_of(anywhere):
            key = self._file_keys.get(column)
            if key is not None and (group := groups.get(key)):
                files[group] = files.get(group, 0) | 1 << column
        return files

    def reach(self, files: int, start: int) -> int:
        """Return how far into the prompt these files together hold each block from `start` on."""
        end = start
        for at, (_, mask) in enumerate(self._layers, start=1):
            until = self._layers[at][0] if at < len(self._layers) else self._length
            if until > end:
                if not mask & files:
                    break
                end = until
        return end


@dataclass(slots=True)
class IndexDraft:
    held: int  # These are columns.
    files: int | None = None


class PrefixIndex:
    """Each rank has the sequence hashes of its present incarnation, in 20 to 38 bytes a block, however many
    ranks hold it.

    `checkpoints` are those of ranks that report them; other ranks can continue wherever they hold
    blocks.

    There is one of the ranks' pools and one of what lies below them. Of the latter some blocks lie in files.
    """

    def __init__(self) -> None:
        self.checkpoints = ResumableBlocks()
        self._holders = BlockHolders()
        # This is the generation of the incarnation that holds the blocks.
        self._generations: dict[RankKey, Generation] = {}
        self._columns: dict[RankKey, int] = {}
        self._file_columns: dict[RankKey, int] = {}
        self._keys: dict[int, RankKey] = {}  # The keys are columns.
        self._file_keys: dict[int, RankKey] = {}
        self._waiting: list[tuple[int, bool, PackedHashes]] = []
        self._num_waiting = 0
        # It has for each column the number of waiting additions minus that of waiting removals.
        self._more: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"PrefixIndex({ {str(key): self.num_blocks(key) for key in self._columns} })"

    @property
    def is_empty(self) -> bool:
        """Return whether no rank has records here."""
        return not self._columns

    @property
    def size_bytes(self) -> int:
        return self._holders.size_bytes

    @property
    def total_blocks(self) -> int:
        return sum(map(self.num_blocks, tuple(self._columns)))

    def generation(self, key: RankKey) -> Generation | None:
        return self._generations.get(key)

    def num_blocks(self, key: RankKey) -> int:
        """Return how many blocks a rank holds, including waiting changes. Any thread may call it."""
        column = self._columns.get(key)
        return 0 if column is None else self._holders.num_blocks(column) + self._more.get(column, 0)

    # -- snapshots: drafted in parts, seen at once -----------------------------------------------------

    def draft(self) -> IndexDraft:
        return IndexDraft(self._holders.take_column())

    def add_to_draft(self, draft: IndexDraft, hashes: Iterable[int]) -> None:
        self._add(draft.held, hashes)

    def mark_in_files(self, draft: IndexDraft, hashes: Iterable[int]) -> None:
        """Note that these blocks of the draft lie in files."""
        if draft.files is None:
            draft.files = self._holders.take_column()
        self._add(draft.files, hashes)

    def _add(self, column: int, hashes: Iterable[int]) -> None:
        blocks = packed(hashes)
        self._holders.change(blocks, np.full(len(blocks), column), np.ones(len(blocks), np.bool_))

    def show_draft(self, draft: IndexDraft, rank: RankId) -> None:
        """Let the rank hold exactly the draft's blocks, in place of those of this or another incarnation.

        Its checkpoints stay: changing them takes long, so the caller does it in slices.
        """
        key = rank.key
        self._give_column(key)
        self._generations[key] = rank.generation
        self._columns[key], self._keys[draft.held] = draft.held, key
        self._holders.show(draft.held)
        if draft.files is not None:
            self._file_columns[key], self._file_keys[draft.files] = draft.files, key

    def drop_draft(self, draft: IndexDraft) -> None:
        self._holders.give_column(draft.held)
        if draft.files is not None:
            self._holders.give_column(draft.files)

    def take_snapshot(self, rank: RankId, hashes: Iterable[int], files: Collection[int] = ()) -> None:
        draft = self.draft()
        self.add_to_draft(draft, hashes)
        if files:
            self.mark_in_files(draft, files)
        self.show_draft(draft, rank)

    def apply_snapshot(
        self,
        rank: RankId,
        hashes: Iterable[int],
        resumable: Iterable[int] = (),
        files: Collection[int] = (),
    ) -> None:
        self.take_snapshot(rank, hashes, files)
        self.checkpoints.remove_rank(rank.key)
        self.checkpoints.add(rank.key, resumable)

    # -- changes ---------------------------------------------------------------------------------------

    def apply_delta(
        self,
        rank: RankId,
        added: Collection[int],
        removed: Collection[int],
        resumable_added: Iterable[int] = (),
        resumable_removed: Iterable[int] = (),
        files_added: Collection[int] = (),
        files_removed: Collection[int] = (),
    ) -> bool:
        """Apply a delta; if this incarnation has no snapshot here, change nothing and return False."""
        key = rank.key
        if self._generations.get(key) != rank.generation:
            return False
        column = self._columns[key]
        self._wait(column, removed, is_added=False)
        self._wait(column, added, is_added=True)
        if files_added or files_removed:
            self._move(key, files_added, files_removed)
        self.checkpoints.remove(key, removed)
        self.checkpoints.remove(key, resumable_removed)
        self.checkpoints.add(key, resumable_added)
        return True

    def _move(self, key: RankKey, files_added: Collection[int], files_removed: Collection[int]) -> None:
        column = self._file_columns.get(key)
        if column is None:
            column = self._file_columns[key] = self._holders.take_column()
            self._file_keys[column] = key
        self._wait(column, files_removed, is_added=False)
        self._wait(column, files_added, is_added=True)

    def _wait(self, column: int, hashes: Collection[int], is_added: bool) -> None:
        if hashes:
            self._waiting.append((column, is_added, packed(hashes)))
            self._num_waiting += len(hashes)
            self._more[column] = self._more.get(column, 0) + (len(hashes) if is_added else -len(hashes))
            if self._num_waiting >= _MOST_WAITING:
                self.take_in()

    def take_in(self) -> None:
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
        self.checkpoints.remove_rank(key)
        self._generations.pop(key, None)
        self._give_column(key)

    def _give_column(self, key: RankKey) -> None:
        self.take_in()
        if (column := self._columns.pop(key, None)) is not None:
            self._holders.give_column(column)
            del self._keys[column]
        if (column := self._file_columns.pop(key, None)) is not None:
            self._holders.give_column(column)
            del self._file_keys[column]

    def correct(self, key: RankKey, hashes: Sequence[int], present_depth: int) -> int:
        """Remove the rank's blocks of this sequence beyond `present_depth`, which the rank reported to hold.

        `hashes` are the blocks that it was believed to hold when the request was sent. If the rank holds
        more, these are not added: their eviction may have been reported already. Returns the number of
        removed blocks.
        """
        column = self._columns.get(key)
        if column is None:
            return 0
        self.take_in()
        before, beyond = self.num_blocks(key), hashes[present_depth:]
        self._wait(column, beyond, is_added=False)
        if key in self._file_columns:
            self._wait(self._file_columns[key], beyond, is_added=False)
        self.take_in()
        self.checkpoints.remove(key, beyond)
        return before - self.num_blocks(key)

    # -- look-ups --------------------------------------------------------------------------------------

    def held(self, hashes: Sequence[int]) -> Held:
        self.take_in()
        runs = self._holders.runs(hashes) if hashes else []
        return Held(runs, self._columns, self._keys)

    def held_below(self, hashes: Sequence[int]) -> HeldBelow:
        self.take_in()
        runs, layers = self._holders.layers(hashes) if hashes else ([], [])
        return HeldBelow(
            *(runs, self._columns, self._keys, layers, self._file_columns, self._file_keys),
            *(self.checkpoints, len(hashes)),
        )

    def match(self, key: RankKey, hashes: Sequence[int]) -> int:
        return self.held(hashes).depth(key)

    def match_all(self, hashes: Sequence[int]) -> dict[RankKey, int]:
        """Return the number of leading blocks for every rank that holds any."""
        return self.held(hashes).depths()
