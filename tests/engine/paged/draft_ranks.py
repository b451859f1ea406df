"""This module has who drafts with a runner's draft model and nothing else, and what becomes of drafts."""

from itertools import accumulate

import pytest

from services.engine.fake_draft import FakeDraftingRunner
from services.engine.paged import drafters
from services.engine.paged.chunks import chunk_of
from services.engine.paged.draft_chances import StepCost
from services.engine.paged.model_runner import Proposal


@pytest.fixture
def every_draft_pays(monkeypatch):
    """Whatever a step takes on this machine: what may be right is verified."""
    monkeypatch.setattr(drafters, "step_cost", lambda *_: StepCost(plain_s=1.0, draft_s=0.0))


def drafts_of(engine):
    """Return how many were right, and how many were not or came behind one that was not."""
    counts = engine.load().drafts
    accepted = sum(each.accepted for each in counts)
    return accepted, sum(each.drafted for each in counts) - accepted


class ModelDrafting:
    """It implements Drafting: the same number of drafts always, as far as they may be."""

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
