"""Conversations with real models through a pair of ranks are those of transformers, token by token."""

from dataclasses import replace

import pytest

from engine.pair import Pair
from engine.torch.copy_queue import staged_on_a_cpu
from engine.torch.paired.families import (
    SERVED,
    WINDOWED_MISTRAL,
    Talk,
    evict_checkpoints,
    new_text,
    send_below,
    torch_settings,
)
from services.engine.torch.runner import TorchRunner
from services.kv.tiers.wait_or_cut import Left
from services.values.rank import Plan

DEFAULT = ["qwen3_5", "gpt_oss"]  # a state, windows
PLANS = [Plan.REMOTE, Plan.REMOTE, Plan.LOCAL, Plan.REMOTE, Plan.LOCAL, Plan.LOCAL]
NEW = [70, 5, 30, 1, 41, 2]
MOST_NEAR_TIES = 1  # of 99 tokens; experts are chosen by logits, too


async def hold_conversations(pair):
    """A conversation under all plans, one that leaves it half way, prompts that are cached to their end or
    can be gone on from nowhere.

    Gives the decode prefixes under remote by conversation, and how many tokens rounding chose.
    """
    talk = Talk(pair)
    for seed, (plan, length) in enumerate(zip(PLANS, NEW, strict=True)):
        await talk.turn(new_text(length, seed), plan)
    branch = talk.branch(90)
    for plan in (Plan.REMOTE, Plan.LOCAL):
        await branch.turn(new_text(9, 20), plan)
    again = talk.branch(64)
    await again.turn([])
    evict_checkpoints(pair)
    for plan in (Plan.REMOTE, Plan.LOCAL):
        await talk.turn(new_text(6, 30), plan)
    await pair.assert_nothing_held()
    talks = talk, branch, again
    return [t.decode_prefixes for t in talks], sum(t.near_ties for t in talks)


async def prefixes_of_full_attention(settings):
    """Hold conversations of the same lengths; the tokens do not matter."""
    full = replace(settings, engine="fake", model="")
    async with Pair(full) as pair:
        return (await hold_conversations(pair))[0]


async def check_conversations(settings):
    async with Pair(settings) as pair:
        prefixes, near_ties = await hold_conversations(pair)
    assert near_ties <= MOST_NEAR_TIES
    assert prefixes == await prefixes_of_full_attention(settings)


async def test_turns_are_exact_and_move_the_delta_and_what_is_carried(subtests):
    for family in DEFAULT:
        with subtests.test(family=family):
            await check_conversations(torch_settings(family))


@pytest.mark.exact
@pytest.mark.parametrize("family", [family for family in SERVED if family not in DEFAULT])
async def test_turns_of_every_family_are_exact(family):
    await check_conversations(torch_settings(family))


# page size, index block, chunk size, cache
SHAPES = [(1, 16, 7, "on"), (4, 8, 64, "on"), (16, 32, 33, "on"), (64, 64, 512, "on"), (16, 16, 13, "off")]
# One of each kind of memory: the others of a kind have one shape each, by turns.
EACH_KIND = (WINDOWED_MISTRAL, "qwen3_5", "falcon_h1", "gemma3", "gpt_oss", "deepseek_v3")
IN_SHAPES = [
    (family, shape)
    for number, family in enumerate(SERVED)
    for place, shape in enumerate(SHAPES)
    if family in EACH_KIND or place == number % len(SHAPES)
]


@pytest.mark.exact
@pytest.mark.parametrize(("family", "shape"), IN_SHAPES)
async def test_turns_are_exact_in_every_shape(family, shape):
    page_size, index_block, chunk_size, cache = shape
    settings = torch_settings(
        family,
        page_size=page_size,
        index_block=index_block,
        chunk_size=chunk_size,
        kv_pages=1024 // page_size,
        decode_cache=cache,
        prefill_cache=cache,
    )
    await check_conversations(settings)


@pytest.mark.exact
@pytest.mark.parametrize("family", SERVED)
async def test_turns_are_exact_when_all_that_was_cached_has_been_in_a_tier(family, monkeypatch):
    """Every second family's slots go through staging memory, as those of a pool on a GPU do."""
    monkeypatch.setattr(Left, "is_worth_reading", True)
    if SERVED.index(family) % 2:
        monkeypatch.setattr(TorchRunner, "staging", staged_on_a_cpu)
    async with Pair(torch_settings(family, kv_tier=("memory:64MiB",), index_block=32)) as pair:
        talk = Talk(pair)
        await talk.turn(new_text(70, 0), Plan.LOCAL)
        await talk.turn(new_text(43, 1), Plan.REMOTE)
        for seed, plan in enumerate([Plan.LOCAL, Plan.REMOTE, Plan.LOCAL, Plan.REMOTE], start=2):
            await send_below(pair)
            held = len(talk.ids) // 32 * 32
            answer = await talk.turn(new_text(39, seed), plan)
            if plan is Plan.LOCAL:  # It computes: behind the last border of the prompt before.
                assert answer.admitted.brought_tokens >= held - 32
            else:  # It receives: it has all pages of whole blocks.
                assert answer.admitted.decode_prefix_len == held
        assert talk.near_ties <= MOST_NEAR_TIES
        await pair.assert_nothing_held()


@pytest.mark.exact
async def test_keys_and_values_of_8_bits_cross_as_they_are(subtests):
    """Half the bytes of bfloat16 cross, with digests; a rank that keeps another type does not pair."""
    settings = torch_settings("gemma3", kv_dtype="fp8_e4m3")
    with subtests.test("what a pair answers is what one rank alone computes"):
        answers = []
        async with Pair(settings) as pair:
            assert {group.dtype for group in pair.decode.layout.groups} == {"float8_e4m3fn"}
            for plan in (Plan.REMOTE, Plan.LOCAL):
                ids, answers_of_plan = [], []
                for seed, length in enumerate((50, 20)):
                    ids += new_text(length, seed)
                    answer = await pair.generate(ids, 9, plan, cache_salt=plan.value)
                    assert (answer.admitted.kv_bytes_moved > 0) == (plan is Plan.REMOTE)
                    answers_of_plan.append(answer.tokens)
                    ids += answer.tokens
                answers.append(answers_of_plan)
            await pair.assert_nothing_held()
        assert answers[0] == answers[1]
    with subtests.test("types differ"):
        async with Pair(settings, prefill_settings=replace(settings, kv_dtype=None)) as pair:
            with pytest.raises(Exception, match=r"the KV layouts differ in (groups|page_bytes)"):
                await pair.generate(new_text(50, 0), 2)
