"""A proposal is what somebody guesses."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    source: str
    ids: Sequence[int]
