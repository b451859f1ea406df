"""Predictions are guesses from the prompts that a rank was sent: which blocks it will soon hold, and where it
can resume.

They are never mixed with the index. A guess expires by itself: the rank's own events report what it really
holds. The module is pure.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from services.values.kv import BlockHash
from services.values.rank import RankKey

_MAX_BLOCKS = 1 << 18

_Until = Mapping[RankKey, float]  # This is the time, by rank, until which it is guessed to hold a block.
_NONE: _Until = {}
# A guess has its end, its rank and blocks, and the one of these after which the rank can resume.
_Guess = tuple[float, RankKey, Sequence[BlockHash], BlockHash | None]


class _Run:
    """A run is adjacent blocks of a sequence that are guessed of the same ranks for the same time."""

    __slots__ = ("num_blocks", "until_s")

    def __init__(self, num_blocks: int, until_s: _Until) -> None:
        self.num_blocks, self.until_s = num_blocks, until_s


class Guessed:
    """This says how much of one sequence each rank is guessed to hold, and after which block it can resume.

    `parts` has the end of each part of it, and until when each rank is guessed to hold that; `resumable` has
    for a block until when each rank is guessed to resume after it.
    """

    __slots__ = ("_hashes", "_now", "_parts", "_resumable")

    def __init__(
        self,
        hashes: Sequence[BlockHash],
        parts: Sequence[tuple[int, _Until]],
        resumable: Mapping[BlockHash, _Until],
        now: float,
    ) -> None:
        self._hashes, self._parts, self._resumable, self._now = hashes, parts, resumable, now

    def depth(self, rank: RankKey) -> int:
        depth, now = 0, self._now
        for end, until_s in self._parts:
            if until_s.get(rank, now) <= now:
                break
            depth = end
        return depth

    def deepest(self) -> list[RankKey]:
        """Return the ranks that are guessed to hold the most of it, in no order. Where too many guesses were
        dropped, they may lack earlier blocks."""
        for _, until_s in reversed(self._parts):
            if ranks := [rank for rank, ends_s in until_s.items() if ends_s > self._now]:
                return ranks
        return []

    def resumable(self) -> Iterator[tuple[int, set[RankKey]]]:
        """Yield where ranks can resume, the deepest first: the number of blocks before it, and the ranks."""
        if not (self._resumable and self._parts):
            return
        # Each is within one of the parts: a rank that can resume after a block holds it.
        for depth in range(self._parts[-1][0], 0, -1):
            if (until_s := self._resumable.get(self._hashes[depth - 1])) is None:
                continue
            if ranks := {rank for rank, ends_s in until_s.items() if ends_s > self._now}:
                yield depth, ranks


class Predictions:
    """The oldest guess is dropped first when there are too many.

    A guess is of the first blocks of a sequence, and may say that the rank can resume after one of them.

    Invariant: none of one rank's blocks along a sequence expires later than those before it, so a rank that
    is guessed to hold a part is guessed to hold all before it. A block's hash covers all before it: so a
    sequence with one of a run's blocks has all before that one, and a prompt that is guessed again, a turn
    longer, changes a few runs and not each of its thousands of blocks. Another router's guesses may
    break this; then what is guessed of these blocks may be wrong, and nothing else.
    """

    def __init__(self) -> None:
        self._runs: dict[BlockHash, _Run] = {}
        self._resumable: dict[BlockHash, _Until] = {}
        self._guesses: deque[_Guess] = deque()
        self._num_blocks = 0  # These are in the guesses.

    def add(
        self, rank: RankKey, hashes: Sequence[BlockHash], now: float, ttl_s: float, resumable: int = 0
    ) -> None:
        """Guess that the rank will hold these for at least `ttl_s` and, if `resumable` is not 0, can resume
        after so many of them."""
        blocks, until_s = tuple(hashes[:_MAX_BLOCKS]), now + ttl_s
        point = blocks[resumable - 1] if 0 < resumable <= len(blocks) else None
        # Where the last block is guessed for so long, those before it are, too.
        is_longer = bool(blocks) and self._until(blocks[-1]).get(rank, now) < until_s
        if is_longer:
            self._replace(blocks, lambda known: _with(known, rank, until_s))
        if point is not None and (known := self._resumable.get(point, _NONE)).get(rank, now) < until_s:
            self._resumable[point] = _with(known, rank, until_s)
            is_longer = True
        if is_longer:
            self._guesses.append((until_s, rank, blocks, point))
            self._num_blocks += len(blocks)
        while self._guesses and (self._guesses[0][0] <= now or self._num_blocks > _MAX_BLOCKS):
            self._drop(*self._guesses.popleft())

    def of(self, hashes: Sequence[BlockHash], now: float) -> Guessed:
        parts: list[tuple[int, _Until]] = []
        position = 0
        while position < len(hashes) and (run := self._runs.get(hashes[position])) is not None:
            position = self._end_in(run, hashes, position)
            parts.append((position, run.until_s))
        return Guessed(hashes, parts, self._resumable, now)

    def forget(self, rank: RankKey) -> None:
        """Drop all guesses of the rank, in O(all guesses)."""
        kept = deque(guess for guess in self._guesses if guess[1] != rank)
        for _, of_rank, blocks, point in self._guesses:
            if of_rank == rank:
                self._drop(float("inf"), rank, blocks, point)
        self._guesses = kept

    def _drop(
        self, until_s: float, rank: RankKey, blocks: Sequence[BlockHash], point: BlockHash | None
    ) -> None:
        self._num_blocks -= len(blocks)
        self._replace(blocks, lambda known: _without(known, rank, until_s))
        if point is not None and (known := self._resumable.get(point)) is not None:
            if left := _without(known, rank, until_s):
                self._resumable[point] = left
            else:
                del self._resumable[point]

    def _end_in(self, run: _Run, hashes: Sequence[BlockHash], begin: int) -> int:
        """Return the end of the part of a sequence that is in the run, which begins at `begin`."""
        runs, low = self._runs, begin + 1
        high = max(low, min(begin + run.num_blocks, len(hashes)))
        if runs.get(hashes[high - 1]) is run:  # This is the usual case.
            return high
        while low < high:  # hashes[begin:low] are in the run, and hashes[high:] are not.
            middle = (low + high + 1) // 2
            if runs.get(hashes[middle - 1]) is run:
                low = middle
            else:
                high = middle - 1
        return low

    def _until(self, block: BlockHash) -> _Until:
        run = self._runs.get(block)
        return _NONE if run is None else run.until_s

    def _replace(self, blocks: Sequence[BlockHash], changed: Callable[[_Until], _Until]) -> None:
        """Replace what is known of each block; `changed` is called once for the blocks of a run."""
        position, before = 0, None
        while position < len(blocks):
            run = self._runs.get(blocks[position])
            if run is None:
                length, known = self._num_unknown(blocks, position), _NONE
            else:
                length, known = self._end_in(run, blocks, position) - position, run.until_s
            end, after = position + length, changed(known)
            if run is not None and after and length == run.num_blocks:
                run.until_s = after
            elif after is not known:
                if run is not None:
                    run.num_blocks -= length  # The rest of it stays, if there is one.
                run = self._set(blocks[position:end], after)
            is_whole = run is not None and run.num_blocks == length
            before = self._joined(before, run, blocks, end) if run is not None and is_whole else None
            position = end

    def _set(self, blocks: Sequence[BlockHash], until_s: _Until) -> _Run | None:
        if not until_s:
            for block in blocks:
                self._runs.pop(block, None)
            return None
        run = _Run(len(blocks), until_s)
        self._runs.update(dict.fromkeys(blocks, run))
        return run

    def _joined(self, before: _Run | None, run: _Run, blocks: Sequence[BlockHash], end: int) -> _Run:
        """Return the run that ends there, joined with the run before it where both are equal; otherwise
        a conversation would have one for each of its turns. The shorter one becomes a part of the
        longer one."""
        if before is None or before.until_s != run.until_s:
            return run
        begin = end - run.num_blocks
        longer, shorter, part = before, run, blocks[begin:end]
        if before.num_blocks < run.num_blocks:
            longer, shorter, part = run, before, blocks[begin - before.num_blocks : begin]
        self._runs.update(dict.fromkeys(part, longer))
        longer.num_blocks += shorter.num_blocks
        return longer

    def _num_unknown(self, blocks: Sequence[BlockHash], position: int) -> int:
        end = position + 1
        while end < len(blocks) and blocks[end] not in self._runs:
            end += 1
        return end - position


def _with(known: _Until, rank: RankKey, until_s: float) -> _Until:
    return known if known.get(rank, until_s) > until_s else {**known, rank: until_s}


def _without(known: _Until, rank: RankKey, until_s: float) -> _Until:
    if rank not in known or known[rank] > until_s:
        return known
    return {other: until for other, until in known.items() if other != rank}
