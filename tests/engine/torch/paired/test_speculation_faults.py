"""A step that verifies could keep too much, too little or another's: each such fault is seen.

Most change tokens; all change what test_speculation.py compares.
"""

import numpy as np
import pytest

from engine.paged.draft_ranks import every_draft_pays
from engine.torch.paired.speculating import (
    DELTA_NET,
    FULL,
    MAMBA,
    WINDOWED,
    lead,
    meet_limits,
    repeat_two_turns,
    settings_of,
    without_drafts,
)
from services.engine.paged import core
from services.engine.paged.carrying import Carrying
from services.engine.torch import draft_tokens, runner
from services.engine.torch.attention import step_view
from services.engine.torch.attention.cpu_attention_kernel import Slots
from services.engine.torch.model.step_cache import TokenRuns

pytestmark = pytest.mark.usefixtures(every_draft_pays.__name__)


def wrong_kv_stays(patch):
    """A chosen token's K and V are not written where a draft's lie: the tree gets the draft's."""
    stored, drafted = step_view.stored_slots, set()

    def mutated(pool, chunks, kv):
        slots = stored(pool, chunks, kv)
        if not len(slots.rows) == len(chunks) == sum(len(chunk.token_ids) for chunk in chunks):
            return slots
        kept = []
        for row, (chunk, *place) in enumerate(zip(chunks, *(ids.tolist() for ids in slots[1:]), strict=True)):
            if is_draft := bool(getattr(chunk.history, "drafts", ())):
                drafted.add((id(kv), *place))
            if is_draft or (id(kv), *place) not in drafted:
                kept.append(row)
        return Slots(*(ids[np.array(kept, np.int64)] for ids in slots))

    patch.setattr(step_view, "stored_slots", mutated)


def publishes_drafts(patch):
    """Drafts are published before it is known which of them are right."""
    account = core.EngineCore._account

    def mutated(self, seq, chunk, sampled):
        if chunk.end // self.page_size > seq.pages.num_published:
            self.cache.publish(seq.pages, [*seq.ids[: chunk.end - chunk.num_drafts], *chunk.drafts])
        account(self, seq, chunk, sampled)

    patch.setattr(core.EngineCore, "_account", mutated)


def keeps_one_too_many(patch):
    """The choice behind the first wrong draft, too."""

    def mutated(drafts, choices):
        return tuple(choices[: len(keep_accepted(drafts, choices)) + 1])

    keep_accepted = runner.keep_accepted
    patch.setattr(runner, "keep_accepted", mutated)


def takes_states(patch, change):
    """`change` makes other firsts and counts of those that are kept, of runs so long."""
    kept = TokenRuns.kept

    def mutated(runs, counts):
        lengths = runs.counts[runs.waits].tolist()
        changed = [change(*each) for each in zip(counts, lengths, strict=True)]
        taken = kept(runs, [count for _, count in changed])
        for run, (skipped, _) in enumerate(changed):
            taken.firsts[run] += skipped
        return taken

    patch.setattr(TokenRuns, "kept", mutated)


def state_one_token_too_far(patch):
    takes_states(patch, lambda count, length: (0, min(length, count + 1)))


def state_one_token_behind(patch):
    takes_states(patch, lambda count, length: (0, max(1, count - 1)))


def state_of_another_row(patch):
    takes_states(patch, lambda count, length: (min(1, length - count), count))


def draws_once_for_all(patch):
    """The number of the first position at all, and the penalties of what was said before the drafts."""
    patch.setattr(draft_tokens, "DraftedHistory", lambda ids, drafts: ids)


def drafts_are_no_output(patch):
    single_token = draft_tokens._single_token

    def mutated(chunk, nth):
        return draft_tokens.replace(single_token(chunk, nth), num_output_ids=chunk.num_output_ids)

    patch.setattr(draft_tokens, "_single_token", mutated)


def drafts_pass_borders(patch):
    patch.setattr(Carrying, "most_ahead", lambda carrying, seq, most: most)


# What is wrong, with whom, led through what, and where that is seen at least.
FAULTS = [
    (wrong_kv_stays, FULL, "tree", repeat_two_turns, "memory"),
    (wrong_kv_stays, FULL, "draft", repeat_two_turns, "tokens"),
    (wrong_kv_stays, WINDOWED, "tree", repeat_two_turns, "tokens"),
    (keeps_one_too_many, FULL, "tree", repeat_two_turns, "tokens"),
    (publishes_drafts, FULL, "tree", repeat_two_turns, "memory"),
    (state_one_token_too_far, MAMBA, "tree", repeat_two_turns, "tokens"),
    (state_one_token_too_far, DELTA_NET, "tree", repeat_two_turns, "tokens"),
    (state_one_token_too_far, DELTA_NET, "draft", repeat_two_turns, "tokens"),
    (state_one_token_behind, MAMBA, "tree", repeat_two_turns, "tokens"),
    (state_of_another_row, MAMBA, "draft", repeat_two_turns, "tokens"),
    (state_of_another_row, DELTA_NET, "tree", repeat_two_turns, "tokens"),
    (draws_once_for_all, FULL, "tree", repeat_two_turns, "tokens"),
    (drafts_are_no_output, FULL, "tree", meet_limits, "tokens"),
    (drafts_pass_borders, MAMBA, "draft", repeat_two_turns, "hits"),
]


async def differences(fault, family, mode, scenario):
    settings = settings_of(family, mode, page_size=4, kv_pages=640)
    plain = await lead(without_drafts(settings), scenario)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        drafted = await lead(settings, scenario)
    assert drafted.rejected > 0
    return set(drafted.differences(plain))


@pytest.mark.exact
@pytest.mark.parametrize(("fault", "family", "mode", "scenario", "seen_in"), FAULTS)
async def test_a_fault_is_seen(fault, family, mode, scenario, seen_in):
    assert seen_in in await differences(fault, family, mode, scenario)
