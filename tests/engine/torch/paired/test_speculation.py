"""Drafts change nothing: tokens, log probabilities, hits, and what stays in memory are as without them."""

from dataclasses import replace

import pytest

from engine.paged.draft_ranks import drafts_of, every_draft_pays
from engine.pair import Pair, core_of
from engine.torch.paired.families import WINDOWED_MISTRAL, die_after, new_text
from engine.torch.paired.speculating import (
    ANSWER,
    FAMILIES,
    FULL,
    GREEDY,
    MAMBA,
    MODES,
    SEEDED,
    WINDOWED,
    compare,
    crowd,
    crowded,
    lead,
    meet_limits,
    repeat_drawn_turns,
    repeat_turns,
    repeat_two_turns,
    say,
    settings_of,
    without_drafts,
)
from services.engine.paged.drafters import Speculation
from services.values.request import FinishReason

pytestmark = pytest.mark.usefixtures(every_draft_pays.__name__)
WITH_EXPERTS = ["qwen3_5_moe", "gpt_oss", "deepseek_v3"]
of_modes = pytest.mark.parametrize("mode", MODES)
of_families = pytest.mark.parametrize("family", FAMILIES)


async def test_two_turns(subtests):
    for family, mode in [(FULL, "draft"), (WINDOWED, "tree"), (MAMBA, "tree")]:
        with subtests.test(family, mode=mode):
            await compare(settings_of(family, mode), repeat_two_turns, num_rejected=3)


@pytest.mark.exact
@of_modes
@of_families
async def test_turns(family, mode):
    await compare(settings_of(family, mode), repeat_turns)


@pytest.mark.exact
@pytest.mark.parametrize("family", [WINDOWED_MISTRAL, "gemma4", "bamba"])
async def test_two_turns_of_other_families(family):
    await compare(settings_of(family, "tree"), repeat_two_turns, num_rejected=3)


@pytest.mark.exact
@pytest.mark.parametrize("family", WITH_EXPERTS)
async def test_two_turns_with_experts(family):
    """Their products round by what else they compute; docs/models.md says how far."""
    settings = settings_of(family, "tree")
    plain, drafted = [await lead(each, repeat_two_turns) for each in (without_drafts(settings), settings)]
    assert set(drafted.differences(plain)) <= {"logprobs", "memory"}
    for ours, theirs in zip(drafted.said, plain.said, strict=True):
        for our, their in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert our.logprob == pytest.approx(their.logprob, abs=2e-4)
    assert drafted.accepted >= 20 and drafted.rejected >= 3


# mode, page size, index block, chunk size, cache
SHAPES = [
    ("draft", 1, 16, 7, "on"),
    ("tree", 4, 8, 64, "on"),
    ("draft", 64, 64, 33, "on"),
    ("tree", 16, 16, 5, "off"),
]


@pytest.mark.exact
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(family, SHAPES[(first + n) % len(SHAPES)], marks=pytest.mark.slow if n else ())
        for first, family in enumerate(FAMILIES)
        for n in range(2)
    ],
)
async def test_turns_in_every_shape(family, shape):
    mode, page_size, index_block, chunk_size, cache = shape
    shaped = {"page_size": page_size, "index_block": index_block, "chunk_size": chunk_size}
    cached = {"decode_cache": cache, "prefill_cache": cache, "kv_pages": 2560 // page_size}
    await compare(settings_of(family, mode, **shaped, **cached), repeat_drawn_turns, num_rejected=5)


# Each family is in one of the next two, and with make test-slow in both.
@pytest.mark.exact
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, MODES[n % 2], marks=pytest.mark.slow if n >= len(MODES) else ())
        for n, family in enumerate(FAMILIES)
    ],
)
async def test_limits(family, mode):
    said = await compare(settings_of(family, mode), meet_limits)
    assert {answer.finished for answer in said} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.exact
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, MODES[1 - n % 2], marks=pytest.mark.slow if n < len(MODES) else ())
        for n, family in enumerate(FAMILIES)
    ],
)
async def test_a_crowd_that_has_some_retracted(family, mode):
    foretold = replace(settings_of(family, "draft"), speculation=mode)  # it repeats itself, too
    await compare(crowded(foretold), crowd, keeps_memory=False, num_rejected=2)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("first", "second", "sampling"),
    [
        ("tree", "off", GREEDY),
        ("draft", "tree", SEEDED),
        ("off", "draft", SEEDED),
        ("lookup", "tree", GREEDY),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@of_families
async def test_a_stream_goes_on_at_a_rank_that_drafts_otherwise(family, first, second, sampling):
    settings, modes = settings_of(family, "draft"), (first, second)
    request = {"sampling": sampling, "cache_salt": "salt"}
    prompt = new_text(45, 1)
    async with Pair(without_drafts(settings)) as pair:
        whole = await say(pair, prompt, **request)
    async with Pair(settings, dp_size=2) as pair:
        for decode, mode in enumerate(modes):
            draft_by(pair.decodes[decode], mode)
            known = await say(pair, prompt, decode=decode, **request)  # to the tree
            assert known.tokens == whole.tokens
        begun = await die_after(pair, pair.request(prompt, ANSWER, **request), ANSWER // 3)
        assert ANSWER // 3 <= len(begun) < ANSWER
        rest = await say(pair, prompt, decode=1, output_ids_so_far=tuple(begun), **request)
        assert (*begun, *rest.tokens) == whole.tokens
        for engine, mode in zip(pair.decodes, modes, strict=True):
            assert mode == "lookup" or (drafts_of(engine)[0] > 0) == (mode != "off")


def draft_by(engine, mode):
    core = core_of(engine)
    core._drafting = Speculation(mode).drafting(core.runner, None)
