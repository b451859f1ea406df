"""Whoever knows what a sequence may go on with."""

from typing import Protocol

from services.engine.paged.drafts.sources.match import Match


class Source(Protocol):
    """Of one sequence. Called once a step at the most, in microseconds."""

    @property
    def name(self) -> str:
        """As metrics have it."""

    def match(self, most: int) -> Match | None:
        """What the ids so far go on with, 1 to `most` ids, and by how many of them it is known."""
