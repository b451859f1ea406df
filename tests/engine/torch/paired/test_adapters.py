"""Answers with LoRA adapters are those of the model that they are merged into, whatever runs beside them."""

import asyncio
from pathlib import Path

import pytest

from engine.pair import Pair, eager
from engine.torch.paired.families import checkpoint, new_text, torch_settings
from exactness.adapters import ATTENTION, adapter_of, merged
from exactness.reference import count_near_ties, reference_generation
from services.values.rank import Plan

TEXTS = [new_text(45, 1), new_text(30, 2)]


def adapters_of(family):
    base = checkpoint(family)
    return {
        "all": adapter_of(base, "all"),
        "half": adapter_of(base, "half", ATTENTION, rank=3, seed=2, use_rslora=True),
    }


def serving(family, **changes):
    lora = tuple(f"{name}={directory}" for name, directory in adapters_of(family).items())
    return torch_settings(family, lora=lora, **changes)


def loaded(pair, name):
    return None if name is None else next(a for a in pair.decode.adapters.loaded if a.name == name)


def near_ties(pair, family, name, prompt, answer):
    base = Path(pair.settings.model)
    directory = base if name is None else merged(base, adapters_of(family)[name])
    return count_near_ties(reference_generation(directory, tuple(prompt), len(answer.tokens)), answer.tokens)


async def check_mixed(family, settings, texts, num_tokens=24, plans=Plan):
    """Of each text one answer for the model and for each adapter, all at once."""
    async with Pair(settings) as pair:
        asked = [(name, text, plan) for text in texts for plan in plans for name in (None, "all", "half")]
        answers = await asyncio.gather(
            *(pair.generate(text, num_tokens, plan, adapter=loaded(pair, name)) for name, text, plan in asked)
        )
        ties = 0
        for (name, text, _), answer in zip(asked, answers, strict=True):
            ties += near_ties(pair, family, name, text, answer)
        assert ties <= 1
        for name, text, plan in asked:  # the conversation goes on from what each has cached
            own = answers[asked.index((name, text, plan))]
            ids = [*text, *own.tokens, *new_text(6, 3)]
            answer = await pair.generate(ids, 6, plan, adapter=loaded(pair, name))
            assert answer.admitted.decode_prefix_len >= 16 or settings.kv_pages < 64  # nothing is evicted
            ties += near_ties(pair, family, name, ids, answer)
        assert ties <= 1
        assert len({tuple(answers[i].tokens) for i in range(3)}) == 3
        await pair.assert_nothing_held()
        return pair.decode.load().retractions


async def test_batches_of_the_model_and_of_adapters_are_exact():
    await check_mixed("llama", serving("llama"), [new_text(40, 1)], 8, [Plan.REMOTE])


@pytest.mark.exact
@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "gemma3", "gpt_oss", "qwen3_5", "falcon_h1"])
async def test_other_families_are_exact(family):
    await check_mixed(family, serving(family), TEXTS)


@pytest.mark.exact
@pytest.mark.parametrize("speculation", ["off", "lookup", "tree"])
async def test_a_crowd_that_has_some_retracted_is_exact(speculation):
    """15 pages for 12 sequences that need 5 each; drafts of an adapter's text are another's, at best."""
    settings = serving(
        "llama", kv_pages=15, max_running_requests=6, speculation=speculation, speculate_unsalted=True
    )
    retractions = await check_mixed("llama", eager(settings), TEXTS, 30)
    assert retractions > 0


@pytest.mark.exact
async def test_a_draft_model_drafts_for_adapters_too():
    draft = str(checkpoint("llama"))
    await check_mixed("llama", serving("llama", speculation="draft", draft_model=draft), TEXTS)
