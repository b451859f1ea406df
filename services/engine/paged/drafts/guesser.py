"""A guesser says what one sequence may go on with, and learns what became of it. It is pure.

Every guess is compared with what followed, verified or not. A source that was wrong several times in a row is
asked less often, until one was right again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.paged.drafts.acceptance import Acceptance, Kind, count_right
from services.engine.paged.drafts.sources.source import Ids, Source

_GOOD = 0.8  # The other sources are not asked from this chance on.
_PATIENCE = 4  # After so many wrong guesses in a row each one makes the rest a step longer.
_MOST_RESTS = 8  # It counts steps.


@dataclass(frozen=True, slots=True)
class Guess:
    kind: Kind
    ids: Ids
    chance: float  # It is that of each id, once those before are right.

    @property
    def source(self) -> str:
        return self.kind[0]


class Guesser:
    def __init__(self, ids: list[int], sources: Sequence[Source], rank: Acceptance) -> None:
        """`ids` are the sequence's, and only ever grow. The first of several sources that are as good is
        taken."""
        self._ids = ids
        self._sources = sources
        self._acceptance = Acceptance(rank)
        self._last: Guess | None = None
        self._guessed_at = 0  # There were so many ids then.
        self._wrong = 0  # It counts guesses in a row of which nothing was right.
        self._rests = 0  # It counts steps to come.

    def guess(self, most: int) -> Guess | None:
        """Return 1 to `most` ids. It is called once a step, whatever comes of it."""
        self._compare()
        if self._rests > 0:
            self._rests -= 1
            return None
        self._last, self._guessed_at = self._best(most), len(self._ids)
        return self._last

    def _compare(self) -> None:
        if self._last is None:
            return
        right, tried = count_right(self._last.ids, self._ids[self._guessed_at :])
        self._acceptance.note(self._last.kind, right, tried)
        self._last = None
        self._wrong = 0 if right else self._wrong + 1
        self._rests = min(_MOST_RESTS, max(0, self._wrong - _PATIENCE))

    def _best(self, most: int) -> Guess | None:
        best: Guess | None = None
        for source in self._sources:
            if best is not None and best.chance >= _GOOD:
                break
            if (match := source.match(most)) is not None:
                kind = source.name, match.length.bit_length()
                chance = self._acceptance.chance(kind)
                if best is None or chance > best.chance:
                    best = Guess(kind, match.ids, chance)
        return best
