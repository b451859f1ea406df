"""Blocks that ranks will soon hold, guessed from what was sent there. Never mixed with the index. Pure.

A guess ends by itself: what the rank really holds comes by its own events.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from services.values.kv import BlockHash
from services.values.rank import RankKey

_MAX_BLOCKS = 1 << 18

_Until = Mapping[RankKey, float]  # by rank, until when it is guessed to hold a block
_NONE: _Until = {}


class Predictions:
    """Oldest guess out first, when there are too many.

    Invariant: of one rank's blocks along a sequence none ends later than those before it, so that a match is
    found by bisection. So neighbours mostly are guessed of the same ranks for the same time: they share one
    mapping, which is never changed. One for each block would keep the garbage collector busy.
    """

    def __init__(self) -> None:
        self._until_s: dict[BlockHash, _Until] = {}
        self._guesses: deque[tuple[float, RankKey, Sequence[BlockHash]]] = deque()  # until_s, rank, blocks
        self._num_blocks = 0  # in the guesses

    def add(self, rank: RankKey, hashes: Sequence[BlockHash], now: float, ttl_s: float) -> None:
        """The rank will hold these for `ttl_s` at least."""
        blocks, until_s = tuple(hashes[:_MAX_BLOCKS]), now + ttl_s
        # Where the last block is guessed for as long as that, so are those before it.
        if blocks and self._until_s.get(blocks[-1], _NONE).get(rank, now) < until_s:
            self._replace(blocks, lambda known: _with(known, rank, until_s))
            self._guesses.append((until_s, rank, blocks))
            self._num_blocks += len(blocks)
        while self._guesses and (self._guesses[0][0] <= now or self._num_blocks > _MAX_BLOCKS):
            self._drop(*self._guesses.popleft())

    def match(self, rank: RankKey, hashes: Sequence[BlockHash], now: float) -> int:
        """How many of `hashes`, from the first on, the rank is guessed to hold."""
        low, high = 0, len(hashes)  # hashes[:low] are guessed, hashes[high:] are not
        if not hashes or self._until_s.get(hashes[0], _NONE).get(rank, now) <= now:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if self._until_s.get(hashes[middle - 1], _NONE).get(rank, now) > now:
                low = middle
            else:
                high = middle - 1
        return low

    def deepest(self, hashes: Sequence[BlockHash], now: float) -> list[RankKey]:
        """Ranks that are guessed to hold as much of the sequence as any; in no order."""
        low, high = 0, len(hashes)  # somebody is guessed to hold hashes[:low], nobody more than hashes[:high]
        deepest = _NONE
        while low < high:
            middle = (low + high + 1) // 2
            at_middle = self._until_s.get(hashes[middle - 1], _NONE)
            if max(at_middle.values(), default=now) > now:
                low, deepest = middle, at_middle
            else:
                high = middle - 1
        return [rank for rank, until_s in deepest.items() if until_s > now]

    def forget(self, rank: RankKey) -> None:
        """In O(all guesses)."""
        kept = deque(guess for guess in self._guesses if guess[1] != rank)
        for _, of_rank, blocks in self._guesses:
            if of_rank == rank:
                self._drop(float("inf"), rank, blocks)
        self._guesses = kept

    def _drop(self, until_s: float, rank: RankKey, blocks: Sequence[BlockHash]) -> None:
        self._num_blocks -= len(blocks)
        self._replace(blocks, lambda known: _without(known, rank, until_s))

    def _replace(self, blocks: Sequence[BlockHash], changed: Callable[[_Until], _Until]) -> None:
        """What is known of each; `changed` is asked once for neighbours that share it."""
        before, after = None, _NONE
        for block in blocks:
            known = self._until_s.get(block, _NONE)
            if known is not before:
                before, after = known, changed(known)
            if after:
                self._until_s[block] = after
            elif known:
                del self._until_s[block]


def _with(known: _Until, rank: RankKey, until_s: float) -> _Until:
    return known if known.get(rank, until_s) > until_s else {**known, rank: until_s}


def _without(known: _Until, rank: RankKey, until_s: float) -> _Until:
    if known.get(rank, until_s) > until_s:
        return known
    return {other: until for other, until in known.items() if other != rank}
