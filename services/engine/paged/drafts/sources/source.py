"""Sources of drafts compare the end of a text with where it stood before. This is pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

LONGEST = 16  # So many ids are compared: a match of that length is hardly ever wrong.

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """`ids` followed where the last `length` ids stood, or with LONGEST those or more."""

    ids: Ids
    length: int


@dataclass(frozen=True, slots=True)
class Trail:
    """The last match of a sequence had `end` ids, the last of which stood before `position`, too."""

    end: int = 0
    position: int = 0  # It is 0 where there was none.

    def position_at(self, end: int) -> int:
        return self.position + end - self.end if self.position else 0


def common_len(ids: Ids, end: int, others: Ids, position: int) -> int:
    """Return how many ids before ids[end] and before others[position] are the same, LONGEST at the most."""
    most, length = min(LONGEST, end, position), 0
    while length < most and ids[end - 1 - length] == others[position - 1 - length]:
        length += 1
    return length


def first_longest(places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the first (length, position) that is longest; a LONGEST one is not searched beyond."""
    best = 0, 0
    for place in places:
        if place[0] > best[0]:
            best = place
        if place[0] >= LONGEST:
            break
    return best


class Source(Protocol):
    """It serves one sequence, and is called once a step at the most, in microseconds."""

    @property
    def name(self) -> str: ...

    def match(self, most: int) -> Continuation | None:
        """Return what the ids so far go on with, 1 to `most` ids, and by how many of them it is known."""
