"""What a sequence's own ids went on with where its last ones stood before."""

from collections.abc import Iterator
from itertools import islice

from services.engine.paged.drafts.sources.match import Ids, Match, Trail, common_len, first_longest
from services.engine.paged.drafts.sources.ngram_chains import NGRAM, NgramChains

# Where a file is copied with changes, 4 give 4.3 tokens a step, 16 give 4.6, and 64 give 4.7.
_MOST_COMPARED = 16
_MIN_HEADS, _MAX_HEADS = 1 << 10, 1 << 16


class OwnNgrams:
    """Of one sequence, whose ids only ever grow; they are read in place. Implements Source."""

    name = "lookup"

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._chains = NgramChains(min(_MAX_HEADS, max(_MIN_HEADS, 1 << len(ids).bit_length())))
        self._trail = Trail()

    @property
    def backlog(self) -> int:
        """Ids that cannot be found yet."""
        return len(self._ids) - self._chains.end

    def index(self, most: int) -> int:
        """Take up to so many more of its ids in; returns how many."""
        first, count = self._chains.end, min(most, self.backlog)
        if count > 0:
            self._chains.add(self._ids[first : first + count])
        return count

    def match(self, most: int) -> Match | None:
        """What followed where the longest part of its end stood, the last time; `most` ids."""
        end = len(self._ids)
        if end <= NGRAM:
            return None
        length, position = first_longest(self._places(end))
        if length < NGRAM:
            return None
        self._trail = Trail(end, position)
        return Match(self._repeated(position, end, most), length)

    def _places(self, end: int) -> Iterator[tuple[int, int]]:
        """(ids in common, position behind them): first where the last match would go on."""
        ids, position = self._ids, self._trail.position_at(end)
        yield common_len(ids, end, ids, position), position
        for position in islice(self._chains.walk(ids[-3], ids[-2], ids[-1]), _MOST_COMPARED):
            yield common_len(ids, end, ids, position), position

    def _repeated(self, first: int, end: int, most: int) -> Ids:
        """ids[first:end], over and over: what stands there twice in a row may go on to."""
        ids = self._ids[first : min(end, first + most)]
        return ids if len(ids) == most else (ids * (most // len(ids) + 1))[:most]
