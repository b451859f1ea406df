"""A stream whose rank stops goes on at another one with the same tokens, greedy or drawn by a seed."""

import itertools

import pytest

from engine.pair import Pair, settled
from engine.torch.paired.families import (
    CARRYING,
    GREEDY,
    Talk,
    die_after,
    new_text,
    sampled_as_plain,
    torch_settings,
)
from services.values.rank import Plan
from services.values.request import SamplingParams

SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
PROMPT, ANSWER, BEFORE = 45, 40, 22  # tokens; a border of blocks lies on either side of the death
DEFAULT = [("qwen3_5", Plan.REMOTE, GREEDY), ("gpt_oss", Plan.LOCAL, SEEDED)]
# Of each family half of what there is: every other one, so that each two values meet.
CASES = [
    (family, plan, sampling)
    for (i, family), (j, plan), (k, sampling) in itertools.product(
        enumerate(CARRYING), enumerate(Plan), enumerate((GREEDY, SEEDED))
    )
    if (i + j + k) % 2 == 0
]
REST = [case for case in CASES if case not in DEFAULT]


def named(value):
    return {id(GREEDY): "greedy", id(SEEDED): "seeded"}.get(id(value))


async def check_moved(family, plan, sampling):
    async with Pair(torch_settings(family, max_running_requests=2), dp_size=2) as pair:
        talk = Talk(pair)
        prompt = new_text(PROMPT, 1)
        begun = await die_after(pair, pair.request(prompt, ANSWER, plan, sampling=sampling), BEFORE)
        assert BEFORE <= len(begun) < ANSWER
        rest = await pair.generate(
            prompt, ANSWER, plan, decode=1, sampling=sampling, output_ids_so_far=tuple(begun)
        )
        rest.tokens[:0] = begun
        assert len(rest.tokens) == ANSWER
        if sampling is GREEDY:
            talk.check(prompt, rest)
        else:
            assert rest.tokens == sampled_as_plain(pair, prompt, rest.tokens, sampling)
        talk.ids = [*prompt, *rest.tokens]
        for plan in Plan:  # and the conversation goes on there
            await talk.turn(new_text(5, 2), plan, decode=1)
        assert talk.near_ties <= 1
        for engine in (pair.decodes[1], *pair.prefills):
            books = await settled(engine)
            assert books.locked == books.private == books.quarantined == 0


@pytest.mark.exact
async def test_a_stream_goes_on_where_its_rank_was_stopped(subtests):
    for family, plan, sampling in DEFAULT:
        with subtests.test(family=family):
            await check_moved(family, plan, sampling)


@pytest.mark.exact
@pytest.mark.parametrize(("family", "plan", "sampling"), REST, ids=named)
async def test_a_stream_of_every_family_goes_on(family, plan, sampling):
    await check_moved(family, plan, sampling)
