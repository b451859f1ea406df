"""Sources of drafts, and where the end of a text stood before, and how much of it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

LONGEST = 16  # ids compared: who has so many in common is hardly ever wrong

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """`ids` followed where the last `length` ids stood; LONGEST: those, or more."""

    ids: Ids
    length: int


@dataclass(frozen=True, slots=True)
class Trail:
    """The last match of a sequence: when it had `end` ids, the last ones stood before `position`, too."""

    end: int = 0
    position: int = 0  # 0: there was none

    def position_at(self, end: int) -> int:
        """Where they would stand now, if both had gone on alike."""
        return self.position + end - self.end if self.position else 0


def common_len(ids: Ids, end: int, others: Ids, position: int) -> int:
    """How many ids before ids[end] and before others[position] are the same; LONGEST at the most."""
    most, length = min(LONGEST, end, position), 0
    while length < most and ids[end - 1 - length] == others[position - 1 - length]:
        length += 1
    return length


def first_longest(places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Of (length, position) the first that is longest; a LONGEST one is not searched beyond."""
    best = 0, 0
    for place in places:
        if place[0] > best[0]:
            best = place
        if place[0] >= LONGEST:
            break
    return best


class Source(Protocol):
    """Of one sequence. Called once a step at the most, in microseconds."""

    @property
    def name(self) -> str:
        """As metrics have it."""

    def match(self, most: int) -> Continuation | None:
        """What the ids so far go on with, 1 to `most` ids, and by how many of them it is known."""
