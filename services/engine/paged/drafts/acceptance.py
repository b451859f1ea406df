"""Acceptance tells how often a sequence's drafts are right lately, and at first the rank's. It is pure.

A draft behind a wrong one says nothing. So a guess of which m ids were right tells of m that were and, unless
it was right to its end, of one that was not. It does so verified or not: what the sequence goes on with shows
what the guess was worth. So a source that is wrong can be listened to without a row for it, and comes back.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.values.load import DraftCount

Kind = tuple[str, int]  # It is the source, and the length of its match by its bits: 3, 4..7, 8..15, 16.

_SEQUENCE_FADING, _RANK_FADING = 0.95, 0.995  # A guess's weight fades by it per later one.
_PRIOR_WEIGHT = 1.5  # So many drafts of a sequence count for as much as what the rank has seen.
_UNKNOWN = 0.5


@dataclass(slots=True)
class _Counts:
    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, fading: float) -> None:
        self.right = fading * self.right + right
        self.tried = fading * self.tried + tried

    def share(self, prior: float, weight: float) -> float:
        return (self.right + weight * prior) / (self.tried + weight)


class Acceptance:
    """It belongs to a sequence, or without `rank` to all of a rank."""

    def __init__(self, rank: "Acceptance | None" = None) -> None:
        self._rank = rank
        self._fading = _RANK_FADING if rank is None else _SEQUENCE_FADING
        self._counts: dict[Kind, _Counts] = {}

    def note(self, kind: Kind, right: int, tried: int) -> None:
        self._counts.setdefault(kind, _Counts()).add(right, tried, self._fading)
        if self._rank is not None:
            self._rank.note(kind, right, tried)

    def chance(self, kind: Kind) -> float:
        prior = self._rank.chance(kind) if self._rank is not None else _UNKNOWN
        counts = self._counts.get(kind)
        return counts.share(prior, _PRIOR_WEIGHT) if counts is not None else prior


def count_right(guess: Sequence[int], actual: Sequence[int]) -> tuple[int, int]:
    """Return how many of the first ids of a guess were right, and of how many that is known."""
    for index, (guessed, token_id) in enumerate(zip(guess, actual, strict=False)):
        if guessed != token_id:
            return index, index + 1
    compared = min(len(guess), len(actual))
    return compared, compared


class DraftCounts:
    def __init__(self) -> None:
        self._drafted = Counter[str]()
        self._accepted = Counter[str]()
        self.tokens_per_step = 0.0  # It is what a decoding sequence got lately, and 0 before there was one.

    def __repr__(self) -> str:
        return f"DraftCounts({self.by_source()} tokens_per_step={self.tokens_per_step:.2f})"

    def note(self, source: str, drafted: int, accepted: int) -> None:
        self._drafted[source] += drafted
        self._accepted[source] += accepted

    def note_step(self, num_sequences: int, num_tokens: int) -> None:
        if num_sequences:
            mean = num_tokens / num_sequences
            before = self.tokens_per_step or mean
            self.tokens_per_step = 0.9 * before + 0.1 * mean

    def by_source(self) -> tuple[DraftCount, ...]:
        return tuple(
            DraftCount(source, drafted, self._accepted[source])
            for source, drafted in sorted(self._drafted.items())
        )
