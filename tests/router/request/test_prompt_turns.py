import asyncio

from services.router.request.progress import PromptTurns
from services.values.rank import Generation, RankId

D0, D1 = (RankId("d", index, Generation(1)) for index in range(2))


def test_one_leads_until_a_rank_holds_the_prompt_or_it_leaves():
    turns = PromptTurns()
    assert turns.lead(2) and turns.lead(2) and not turns.lead(0)
    turns.held(2, D0)
    assert turns.holders(()) == [D0] and turns.holders({D0}) == []
    turns.lost(D1)
    turns.lost(D0)
    turns.lost(D0)
    assert turns.holders(()) == []
    assert turns.lead(1)

    turns = PromptTurns()
    assert turns.lead(0)
    turns.leave(1)
    assert not turns.lead(1)
    turns.leave(0)
    assert turns.lead(1)


async def test_all_that_wait_are_told_and_none_is_told_twice():
    turns = PromptTurns()
    turns.lead(0)
    waiting = [asyncio.create_task(turns.changed(60)) for _ in range(3)]
    await asyncio.sleep(0)
    turns.held(0, D0)
    await asyncio.gather(*waiting)
    again = asyncio.create_task(turns.changed(60))
    await asyncio.sleep(0)
    assert not again.done()
    turns.look()
    await again


async def test_waiting_ends_with_the_time_that_is_left():
    await PromptTurns().changed(0.001)
