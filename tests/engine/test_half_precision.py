"""In half precision ranks are as near to float32 as transformers' own backends: both plans, in one batch."""

import asyncio
from dataclasses import replace

import pytest
import torch

from engine.pair import FAKE, Pair
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import check_half_precision, random_prompt
from services.values.rank import Plan

PROMPTS = [random_prompt(20 + 31 * i, seed=i) for i in range(4)]


@pytest.mark.exact
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_every_token_is_within_what_rounding_explains(dtype):
    directory = tiny_checkpoint("qwen3")
    settings = replace(
        FAKE,
        engine="torch",
        model=str(directory),
        kv_pages=128,
        page_size=16,
        index_block=16,
        dtype=dtype,
        max_running_requests=16,
        chunk_size=48,
    )
    async with Pair(settings) as pair:
        asked = [(prompt, plan) for prompt in PROMPTS for plan in Plan]
        for _ in range(2):  # the second time the prefix is there
            answers = await asyncio.gather(*(pair.generate(prompt, 24, plan) for prompt, plan in asked))
            for (prompt, _), answer in zip(asked, answers, strict=True):
                check_half_precision(directory, prompt, answer.tokens, getattr(torch, dtype))
        await pair.assert_nothing_held()
