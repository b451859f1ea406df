"""These tests show where a request for several answers is let in, and where its further answers go."""

from dataclasses import replace

import pytest

from router.cluster.fake_mirror import D0, D0_KEY, D1, D1_KEY, queue
from services.values.errors import NoCapacity, Unavailable


async def test_the_last_answer_waits_behind_the_others(two_decodes, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    for rank in (D0_KEY, D1_KEY):
        queue(balance, rank, 5.0)
    two_decodes.check_room(6.0)
    two_decodes.place(prompt, "", frozenset(), 6.0)
    with pytest.raises(NoCapacity):
        two_decodes.check_room(6.0, answers=100)
    with pytest.raises(NoCapacity):
        two_decodes.place(replace(prompt, answers=100), "", frozenset(), 6.0)


async def test_a_further_answer_goes_where_the_prompt_is_while_that_life_lasts(two_decodes, balance):
    prompt = await two_decodes.hash(tuple(range(40)), "")
    for view, key in ((D0, D0_KEY), (D1, D1_KEY)):
        queue(balance, key, 60.0)
        placed = two_decodes.place_at(prompt, "", frozenset(), view.registration.id)
        assert placed.decision.chosen.decode.id == view.registration.id
        assert placed.decision.reason == "same_prompt"

    incarnation = D0.registration.id
    with pytest.raises(Unavailable):
        two_decodes.place_at(
            prompt, "", frozenset(), replace(incarnation, generation=incarnation.generation + 1)
        )
    two_decodes.failed(incarnation)
    with pytest.raises(Unavailable, match="failed"):
        two_decodes.place_at(prompt, "", frozenset(), incarnation)
