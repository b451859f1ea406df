"""What the engine core asks of whoever drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.paged import sequence
from services.engine.paged.drafts.proposal import Proposal
from services.engine.paged.queue.step_time import StepTimes


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence that decodes one token in the next step, and the most drafts that it may have beside it."""

    seq: sequence.Sequence
    most: int


class Drafting(Protocol):
    """Called from the engine's thread only. Nothing that it says changes what is generated."""

    def propose(
        self, wishes: Sequence[Wish], max_drafts: int, step_times: StepTimes
    ) -> Sequence[Proposal | None]:
        """For each wish what to verify, if anything; no more than `max_drafts` together."""

    def note(self, seq: sequence.Sequence, proposal: Proposal, num_accepted: int) -> None:
        """A step has verified it: its first `num_accepted` ids were right, and are among seq.ids."""

    def ended(self, seq: sequence.Sequence) -> None:
        """It asks for nothing any more, whether it ever did or not. Its ids are still there."""
