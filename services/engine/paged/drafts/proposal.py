"""What somebody guesses."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a sequence may go on with; `source` names who said so."""

    source: str
    ids: Sequence[int]
