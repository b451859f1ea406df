"""A small model drafts here: each sequence gets as many drafts as are worth what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.paged import sequence
from services.engine.paged.batch import chunk_of
from services.engine.paged.drafts.acceptance import Acceptance
from services.engine.paged.drafts.draft_failures import DraftFailures
from services.engine.paged.drafts.drafter import step_cost
from services.engine.paged.drafts.drafting import Wish
from services.engine.paged.drafts.proposal import Proposal
from services.engine.paged.drafts.row_shares import Candidate, StepCost, share_rounds
from services.engine.paged.queue.step_time import StepTimes
from services.engine.paged.runner import DraftModel

_KIND = "draft", 0
# A sequence that is not worth a draft tries one every so many steps: all in the same step, for a round takes
# as long for one as for all, and one in 32 that costs a fifth of a step is 0.6 %. Those that were wrong take
# every second of these occasions, then every fourth, every eighth; newcomers the eighth at once where nobody
# is right.
_TRY_EVERY = 32
_LONGEST_REST = 8
_HOPELESS = 0.1  # It is the chance of a draft.


@dataclass(slots=True)
class _Drafted:
    acceptance: Acceptance
    rest: int  # It tries at each so-many-th occasion.


class ModelDrafter:
    """It implements Drafting."""

    def __init__(
        self, draft: DraftModel, page_size: int, most: int, itl_target_s: float | None = None
    ) -> None:
        self._draft = draft
        self._page_size = page_size
        self._most = most
        self._itl_target_s = itl_target_s
        self._acceptance = Acceptance()
        self._failures = DraftFailures("drafts")
        self._steps = 0
        self._drafted: dict[sequence.Sequence, _Drafted] = {}

    def __repr__(self) -> str:
        return f"ModelDrafter(sequences={len(self._drafted)} chance={self._acceptance.chance(_KIND):.2f})"

    def propose(
        self, wishes: Sequence[Wish], max_drafts: int, step_times: StepTimes
    ) -> Sequence[Proposal | None]:
        if not wishes:
            return []  # Nobody decodes.
        counts = self._counts(wishes, max_drafts, step_cost(step_times, len(wishes), self._itl_target_s))
        proposals: list[Proposal | None] = [None] * len(wishes)
        asked = [index for index, count in enumerate(counts) if count]
        if asked and not self._failures.gave_up:
            chunks = [chunk_of(wishes[index].seq, 1, self._page_size) for index in asked]
            with self._failures.noting():
                drafts = self._draft.propose(chunks, [counts[index] for index in asked])
                for index, ids in zip(asked, drafts, strict=True):
                    proposals[index] = Proposal(_KIND[0], ids) if ids else None
        return proposals

    def note(self, seq: sequence.Sequence, proposal: Proposal, num_accepted: int) -> None:
        drafted = self._drafted[seq]
        drafted.acceptance.note(_KIND, num_accepted, min(num_accepted + 1, len(proposal.ids)))
        drafted.rest = 1 if num_accepted else min(_LONGEST_REST, 2 * drafted.rest)

    def ended(self, seq: sequence.Sequence) -> None:
        self._drafted.pop(seq, None)

    def _counts(self, wishes: Sequence[Wish], max_drafts: int, cost: StepCost) -> list[int]:
        candidates = [
            Candidate(min(wish.most, self._most), self._of(wish.seq).acceptance.chance(_KIND))
            for wish in wishes
        ]
        counts = share_rounds(candidates, len(wishes), max_drafts, cost, self._draft.step_s)
        self._steps += 1
        occasion, steps_since = divmod(self._steps, _TRY_EVERY)
        if steps_since == 0:
            self._try_again(occasion, wishes, counts, max_drafts, cost)
        return counts

    def _try_again(
        self, occasion: int, wishes: Sequence[Wish], counts: list[int], max_drafts: int, cost: StepCost
    ) -> None:
        guessing_s = self._draft.step_s * max(1, *counts)
        for index, wish in enumerate(wishes):
            total, drafted = sum(counts), self._of(wish.seq)
            step_s = cost.plain_s + guessing_s + (total + 1) * cost.draft_s
            if counts[index] or not wish.most or total == max_drafts or not cost.allows(step_s):
                continue
            if occasion % drafted.rest == 0:
                counts[index] = 1

    def _of(self, seq: sequence.Sequence) -> _Drafted:
        if seq not in self._drafted:
            hopeless = self._acceptance.chance(_KIND) < _HOPELESS
            self._drafted[seq] = _Drafted(Acceptance(self._acceptance), _LONGEST_REST if hopeless else 1)
        return self._drafted[seq]
