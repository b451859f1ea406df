"""Who drafts with a runner's draft model and nothing else, and counts."""

from itertools import accumulate

from services.engine.fake_draft import FakeDraftingRunner
from services.engine.paged.batch import chunk_of
from services.engine.paged.drafts.proposal import Proposal


class ModelDrafting:
    """Implements Drafting: the same number of drafts always, as far as they may be."""

    def __init__(self, runner, num_drafts=3):
        self._runner = runner
        self._num_drafts = num_drafts
        self.drafted = self.accepted = 0

    def propose(self, wishes, max_drafts, step_times):
        page_size = self._runner.layout.page_size
        chunks = [chunk_of(wish.seq, 1, page_size) for wish in wishes]
        wanted = [min(self._num_drafts, wish.most) for wish in wishes]
        counts = [
            max(0, min(count, count + max_drafts - total))
            for count, total in zip(wanted, accumulate(wanted), strict=True)
        ]
        return [Proposal("draft", ids) if ids else None for ids in self._runner.draft.propose(chunks, counts)]

    def note(self, seq, proposal, num_accepted):
        self.drafted += len(proposal.ids)
        self.accepted += num_accepted

    def ended(self, seq):
        pass

    @property
    def acceptance(self):
        """Of what was drafted up to the first that was wrong, which ends a step's."""
        return self.accepted / self.drafted


def draft_with(core, num_drafts=3):
    """From now on; the core is its thread's: before anything runs."""
    core._drafting = ModelDrafting(core.runner, num_drafts)
    return core._drafting


def drafting_runner(settings):
    return lambda **fields: FakeDraftingRunner(settings, **fields)
