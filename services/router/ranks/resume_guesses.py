"""These are checkpoints that ranks will soon have, guessed from what was sent there. Pure.

As with Predictions a guess ends by itself. These are single blocks: the last of a prompt, or of an answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from services.index.read.resumable_blocks import ResumableBlocks
from services.values.kv import BlockHash
from services.values.rank import RankKey

_MAX_GUESSES = 1 << 14


class ResumeGuesses:
    """The guess that ends first goes out first, when there are too many."""

    def __init__(self) -> None:
        self._points = ResumableBlocks()
        self._until_s: dict[tuple[RankKey, BlockHash], float] = {}  # of those in `_points`
        self._ends: list[tuple[float, RankKey, BlockHash]] = []  # a heap; a longer guess has several

    def add(self, rank: RankKey, block: BlockHash, now: float, ttl_s: float) -> None:
        """Guess that the rank will be able to go on after this block for `ttl_s` at least."""
        until_s, guess = now + ttl_s, (rank, block)
        if until_s > self._until_s.get(guess, now):
            self._until_s[guess] = until_s
            self._points.add(rank, (block,))
            heappush(self._ends, (until_s, rank, block))
        self._expire(now)
        while len(self._ends) > _MAX_GUESSES:
            self._drop(*heappop(self._ends))

    def deepest(
        self, hashes: Sequence[BlockHash], most: Mapping[RankKey, int], now: float
    ) -> dict[RankKey, int]:
        """Return the deepest guess of each, as ResumableBlocks.deepest."""
        self._expire(now)
        return self._points.deepest(hashes, most)

    def along(self, hashes: Sequence[BlockHash], now: float) -> Iterator[tuple[int, frozenset[RankKey]]]:
        """Yield the guesses along a sequence, as ResumableBlocks.along."""
        self._expire(now)
        return self._points.along(hashes)

    def forget(self, rank: RankKey) -> None:
        self._points.remove_rank(rank)
        self._until_s = {guess: until_s for guess, until_s in self._until_s.items() if guess[0] != rank}

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            self._drop(*heappop(self._ends))

    def _drop(self, until_s: float, rank: RankKey, block: BlockHash) -> None:
        if self._until_s.get((rank, block)) == until_s:
            del self._until_s[rank, block]
            self._points.remove(rank, (block,))
