"""Answers of real models are exact though pages, states and windows are too few for all that run."""

import asyncio

import pytest

from engine.pair import Pair, eager
from engine.torch.paired.families import (
    CARRYING,
    Talk,
    new_text,
    sampled_as_plain,
    torch_settings,
)
from services.values.rank import Plan
from services.values.request import SamplingParams

CROWD, ANSWER, DEFAULT = 6, 40, ["falcon_h1", "gpt_oss"]
SEEDED = SamplingParams(temperature=1.0, seed=5)


def crowded(family):
    """15 pages for 6 sequences that need 4 each, and no more states and windows than running ones take."""
    carried = {"state_slots": 2 * CROWD, "window_pages": 4 * CROWD}
    return eager(torch_settings(family, kv_pages=15, max_running_requests=CROWD, **carried))


async def check_crowd(family):
    """Half greedy, half sampled; half under either plan."""
    async with Pair(crowded(family)) as pair:
        prompts = [new_text(20 + i, 10 + i) for i in range(CROWD)]
        plans = [list(Plan)[i % 2] for i in range(CROWD)]
        samplings = [{}, {}, {"sampling": SEEDED}] * 2
        answers = await asyncio.gather(
            *(
                pair.generate(prompt, ANSWER, plan, **sampling)
                for prompt, plan, sampling in zip(prompts, plans, samplings, strict=True)
            )
        )
        assert pair.decode.load().retractions > 0
        talk = Talk(pair)
        for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True):
            assert len(answer.tokens) == ANSWER
            if sampling:
                assert answer.tokens == sampled_as_plain(pair, prompt, answer.tokens, SEEDED)
            else:
                talk.check(prompt, answer)
        assert talk.near_ties <= 1
        await pair.assert_nothing_held()


@pytest.mark.exact
async def test_a_crowd_that_has_some_retracted_is_exact(subtests):
    for family in DEFAULT:
        with subtests.test(family=family):
            await check_crowd(family)


@pytest.mark.exact
@pytest.mark.parametrize("family", [family for family in CARRYING if family not in DEFAULT])
async def test_a_crowd_of_every_family_is_exact(family):
    await check_crowd(family)
