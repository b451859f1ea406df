"""A small checkpoint drafts on decode, computed by prefill too or not: tokens are those of no drafts."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from engine.paged.draft_ranks import draft_with
from engine.pair import Pair, core_of, eager
from engine.torch.paired.families import new_text, torch_settings
from exactness.checkpoints import tiny_checkpoint
from exactness.draft_checkpoints import grown_checkpoint
from services.values.errors import Unavailable
from services.values.rank import Plan
from services.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=11)
FULL, WINDOWED, RECURRENT = "llama", "gemma3", "falcon_h1"  # the last two it foretells by luck alone
PROMPT, ANSWER = 45, 40
salts = (f"salt-{n}" for n in count())


def settings_of(family, **changes):
    model = str(grown_checkpoint()) if family == FULL else torch_settings(family).model
    return torch_settings(family, model=model, draft_model=str(tiny_checkpoint()), **changes)


async def answers(pair, drafting, plan, decode=0):
    """Answer two turns, greedy and drawn, without drafts or with; nobody finds the others' prefixes."""
    core_of(pair.decodes[decode])._drafting = drafting
    said = []
    for sampling in (GREEDY, SEEDED):
        salt, history = next(salts), []
        for turn in range(2):
            history += new_text(PROMPT if turn == 0 else 9, turn)
            answer = await pair.generate(
                history, ANSWER, plan, decode=decode, sampling=sampling, cache_salt=salt
            )
            said.append(answer)
            history += answer.tokens
    return said


def drafting_of(pair):
    drafting = draft_with(core_of(pair.decode))
    core_of(pair.decode)._drafting = None
    return drafting


async def check_tokens(family, plans):
    """Gives the acceptance under each plan."""
    async with Pair(settings_of(family)) as pair:
        drafting, shares = drafting_of(pair), []
        for plan in plans:
            plain = await answers(pair, None, plan)
            drafting.drafted = drafting.accepted = 0
            drafted = await answers(pair, drafting, plan)
            assert [a.tokens for a in drafted] == [a.tokens for a in plain]
            hits = [(a.admitted.decode_prefix_len, a.admitted.prefill_prefix_len) for a in drafted]
            assert hits == [(a.admitted.decode_prefix_len, a.admitted.prefill_prefix_len) for a in plain]
            assert drafting.drafted > 100
            shares.append(drafting.acceptance)
        await pair.assert_nothing_held()
    return shares


async def test_tokens_are_those_of_no_drafts_which_are_as_good_through_pd():
    """The draft is on both sides, or decode computes the prompt itself."""
    remote, local = await check_tokens(FULL, [Plan.REMOTE, Plan.LOCAL])
    assert local > 0.5  # drawn ones among them
    assert remote >= 0.99 * local


@pytest.mark.exact
@pytest.mark.parametrize("family", [WINDOWED, RECURRENT])
async def test_tokens_of_a_model_that_carries_something_are_those_of_no_drafts(family):
    await check_tokens(family, [Plan.REMOTE])


@pytest.mark.exact
@pytest.mark.parametrize("family", [WINDOWED, RECURRENT])
async def test_tokens_are_those_of_no_drafts_where_decode_computes_the_prompt(family):
    await check_tokens(family, [Plan.LOCAL])


async def test_the_drafts_bytes_are_counted_by_the_page():
    async with Pair(settings_of(FULL)) as pair:
        layout = pair.decode.layout
        draft_bytes = layout.draft.group.unit_bytes
        assert layout.unit_bytes == (2 * draft_bytes, draft_bytes)
        [first, second, *_] = await answers(pair, drafting_of(pair), Plan.REMOTE)
        for answer, prompt_len in ((first, PROMPT), (second, PROMPT + ANSWER + 9)):
            pages = -(-prompt_len // 16) - answer.admitted.decode_prefix_len // 16
            assert answer.admitted.carried_bytes == {"draft": pages * draft_bytes}
            assert answer.admitted.kv_bytes_moved == pages * 3 * draft_bytes
            assert answer.admitted.digested_pages == 2 * pages
        await pair.assert_nothing_held()


@pytest.mark.exact
async def test_tokens_are_those_of_no_drafts_with_a_draft_on_one_side(subtests):
    for side in ["decode", "prefill"]:
        with subtests.test(side=side):
            both = settings_of(FULL)
            without = replace(both, draft_model="")
            decode, prefill = (both, without) if side == "decode" else (without, both)
            async with Pair(decode, prefill_settings=prefill) as pair:
                plain = await answers(pair, None, Plan.REMOTE)
                assert all(answer.admitted.carried_bytes == {} for answer in plain)
                if side == "decode":
                    drafting = drafting_of(pair)
                    drafted = await answers(pair, drafting, Plan.REMOTE)
                    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
                    assert drafting.acceptance > 0.5  # it has caught up
                await pair.assert_nothing_held()


async def test_a_crowd_that_has_some_retracted_drafts_all_the_same():
    settings = eager(settings_of(FULL, kv_pages=15, max_running_requests=6))
    async with Pair(settings) as pair:
        drafting, said = drafting_of(pair), []
        for each in (None, drafting):
            core_of(pair.decode)._drafting = each
            salt = next(salts)
            said.append(
                await asyncio.gather(
                    *(
                        pair.generate(
                            new_text(20 + i, 10 + i),
                            ANSWER,
                            list(Plan)[i % 2],
                            sampling=SEEDED if i % 3 == 2 else GREEDY,
                            cache_salt=salt,
                        )
                        for i in range(6)
                    )
                )
            )
            assert pair.decode.load().retractions > 0
        assert [a.tokens for a in said[1]] == [a.tokens for a in said[0]]
        assert drafting.acceptance > 0.5
        await pair.assert_nothing_held()


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.exact), SEEDED])
async def test_a_stream_moves_between_ranks_that_draft_and_do_not(sampling):
    async with Pair(settings_of(FULL), dp_size=2) as pair:
        prompt = new_text(PROMPT, 1)
        plain = await pair.generate(prompt, ANSWER, sampling=sampling, decode=1)
        drafting, tokens = draft_with(core_of(pair.decodes[0])), []
        request = pair.request(prompt, ANSWER, sampling=sampling, cache_salt="other")
        with pytest.raises(Unavailable):
            async with pair.outputs(request) as outputs:
                async for output in outputs:
                    tokens += output.token_ids
                    if len(tokens) >= ANSWER // 2:
                        raise Unavailable("it is said to be lost")
        rest = await pair.generate(
            prompt, ANSWER, decode=1, sampling=sampling, output_ids_so_far=tuple(tokens)
        )
        assert [*tokens, *rest.tokens] == plain.tokens
        assert drafting.accepted > 0
        await pair.assert_nothing_held()
