"""Checkpoints of all shapes that we take generate what transformers does: both plans, cached, in a batch."""

import asyncio
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair
from exactness.checkpoints import SHAPES, shaped_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.values.rank import Plan

ANSWER = 8
# Between them: each way to stretch angles, tied and biased weights, heads of another size, one KV head, large
# groups, sizes that no kernel likes.
FEW = ("llama3-rope", "yarn", "tied-qwen3", "head-dim-6", "one-kv-head")


async def check(shape, page_size, chunk_size, num_threads, lengths):
    directory = shaped_checkpoint(shape)
    settings = replace(
        FAKE,
        engine="torch",
        model=str(directory),
        kv_pages=4096 // page_size,
        page_size=page_size,
        index_block=64,
        max_running_requests=16,
        chunk_size=chunk_size,
        num_threads=num_threads,
    )
    async with Pair(settings) as pair:
        asked = [(random_prompt(length, seed=length), plan) for length in lengths for plan in Plan]
        for turn in range(2):
            answers = await asyncio.gather(*(pair.generate(prompt, ANSWER, plan) for prompt, plan in asked))
            for (prompt, _), answer in zip(asked, answers, strict=True):
                count_near_ties(reference_generation(directory, prompt, ANSWER), answer.tokens)
            asked = [
                ((*prompt, *answer.tokens, *random_prompt(5, seed=turn)), plan)
                for (prompt, plan), answer in zip(asked, answers, strict=True)
            ]
        await pair.assert_nothing_held()


async def test_a_shape_is_exact(subtests):
    for shape in FEW:
        with subtests.test(shape=shape):
            await check(shape, 16, 24, 1, lengths=(17, 150))


# page size, chunk size, threads
SETTINGS = [(1, 24, 1), (16, 4096, 2), (64, 50, 1)]
# Of the others each has one of them.
EVERY_SHAPE = [
    (shape, settings)
    for number, shape in enumerate(SHAPES)
    for settings in (SETTINGS if shape in FEW else [SETTINGS[number % len(SETTINGS)]])
]


@pytest.mark.exact
@pytest.mark.parametrize(("shape", "settings"), EVERY_SHAPE)
async def test_every_shape_is_exact(shape, settings):
    await check(shape, *settings, lengths=(1, 15, 16, 17, 63, 64, 65, 130, 300))
