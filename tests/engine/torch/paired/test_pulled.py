"""Conversations that move at every turn pull what was there before, and go on as transformers would."""

import asyncio
from itertools import cycle

import pytest

from engine.pair import Pair
from engine.torch.paired.families import SERVED, Talk, new_text, torch_settings
from services.engine.paged.shell import pulling
from services.engine.paged.shell.pulling import PullBounds
from services.values.rank import Plan

pytestmark = pytest.mark.exact


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(pulling, "BOUNDS", PullBounds(least_s=60.0, unknown_s=60.0, grant_s=60.0))


async def converse(pair, seed, pulled):
    """Each turn is another rank's, and has the one before as its source, of whatever role that was."""
    talk, before = Talk(pair), None
    ranks = cycle([(Plan.LOCAL, 0), (Plan.LOCAL, 1), (Plan.REMOTE, 0), (Plan.REMOTE, 1), (Plan.LOCAL, 0)])
    for turn, (plan, rank) in zip(range(6), ranks, strict=False):
        where = {"decode": rank, "prefill": rank}
        if before is not None:
            where["pull_from"] = pair.source(before, len(talk.ids))
        answer = await talk.turn(new_text(30 + 7 * turn, 100 * seed + turn), plan, **where)
        if answer.admitted.pulled is not None:
            pulled.append(answer.admitted.pulled)
        before = pair.prefills[rank] if plan is Plan.REMOTE and seed % 2 else pair.decodes[rank]
    return talk


@pytest.mark.parametrize("family", SERVED)
async def test_a_conversation_that_moves_at_every_turn_pulls_its_past(family):
    pulled = []
    async with Pair(torch_settings(family, kv_pages=128, window_pages=96), dp_size=2) as pair:
        for seed in range(2):
            await converse(pair, seed, pulled)
        await asyncio.gather(*(converse(pair, seed, pulled) for seed in (2, 3)))
        await pair.assert_nothing_held()
    assert sum(each.tokens > 0 for each in pulled) >= 10
    assert {each.refused for each in pulled} <= {"", "evicted", "busy"}
