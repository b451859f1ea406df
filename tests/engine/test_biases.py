"""Biases and bans over both of our engines: an oracle's tokens, with drafts and after a move, too."""

import itertools
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from engine.paged.core_rank import Guesses
from engine.pair import FAKE, Pair, core_of
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt
from exactness.ruled import Rules, ruled_generation
from services.engine.fake import FakeModel, choose
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.values.rank import Plan
from services.values.request import Constraint, ConstraintKind, FinishReason, SamplingParams

PROMPT, COUNT = random_prompt(21, seed=4), 16
GREEDY = SamplingParams(temperature=0)


def fake_generation(prompt, count, rules):
    """What a FakeRunner must generate."""
    model, output = FakeModel(prompt), list[int]()
    for _ in range(count):
        allowed = np.ones(512, bool)
        allowed[list(rules.banned_after(output))] = False
        output.append(choose(model.total, len(prompt) + len(output), allowed, tuple(rules.biases.items())))
        model.take(output[-1])
    return output


ENGINES = ["fake", "torch"]


def settings_of(engine):
    model = str(tiny_checkpoint()) if engine == "torch" else FAKE.model
    return replace(FAKE, engine=engine, model=model, kv_pages=256)


def expected(engine, rules):
    if engine == "fake":
        return fake_generation(PROMPT, COUNT, rules)
    return ruled_generation(tiny_checkpoint(), PROMPT, COUNT, rules)


def guesses(tokens, is_right=lambda seq, index: True):
    return Guesses(
        lambda ids, count: (tokens * 2)[len(ids) - len(PROMPT) :][:count], cycle([3, 0, 2, 5]), is_right
    )


def rules_for(engine):
    """That change an answer at its first token and later, each of them for itself."""
    plain = expected(engine, Rules())
    first = plain[0]
    banned = expected(engine, Rules(bad=((first,),)))
    bad = ((first,), tuple(banned[3:6]), (PROMPT[-1], banned[0]))
    after = expected(engine, Rules(bad=bad))
    assert after[:5] == banned[:5] != plain[:5] and after[5] != banned[5]
    biases = {after[8]: -100.0, 77: 2.0, 78: -3.5}
    both = Rules(biases, bad)
    assert expected(engine, both) not in (after, plain)
    return both


@pytest.mark.exact
async def test_tokens_are_the_oracles_with_drafts_and_after_a_move(subtests):
    for plan, engine in itertools.product(Plan, ENGINES):
        with subtests.test(plan=plan, engine=engine):
            rules = rules_for(engine)
            wanted = expected(engine, rules)
            sampling = replace(GREEDY, logit_bias=tuple(rules.biases.items()), bad_token_ids=rules.bad)
            async with Pair(settings_of(engine)) as pair:
                assert (await pair.generate(PROMPT, COUNT, plan, sampling=sampling)).tokens == wanted
                moved = await pair.generate(
                    PROMPT, COUNT, plan, sampling=sampling, output_ids_so_far=(*wanted[:4],)
                )
                assert wanted[:4] + moved.tokens == wanted

                right = guesses(wanted, lambda seq, index: (len(seq.ids) + index) % 4 > 0)
                core_of(pair.decode)._drafting = right
                assert (await pair.generate(PROMPT, COUNT, plan, sampling=sampling)).tokens == wanted
                noted = [each for steps in right.noted.values() for each in steps]
                assert sum(accepted for _, accepted in noted) > 3
                assert any(accepted < drafted for drafted, accepted in noted)
                await pair.assert_nothing_held()


async def test_sampled_tokens_are_the_same_with_drafts_and_none_is_banned(subtests):
    for plan in Plan:
        with subtests.test(plan=plan):
            bad = tuple((token_id,) for token_id in range(0, 512, 2))
            hot = replace(GREEDY, temperature=2.0, seed=5, bad_token_ids=bad, logit_bias=((101, 6.0),))
            async with Pair(settings_of("torch")) as pair:
                plain = (await pair.generate(PROMPT, COUNT, plan, sampling=hot)).tokens
                assert all(token_id % 2 for token_id in plain) and 101 in plain
                core_of(pair.decode)._drafting = guesses(plain)
                assert (await pair.generate(PROMPT, COUNT, plan, sampling=hot)).tokens == plain


async def test_what_leaves_no_token_or_is_no_id_is_refused(subtests):
    for plan, engine in itertools.product(Plan, ENGINES):
        with subtests.test(
            "where nothing is left the answer fails by name and gives all back", plan=plan, engine=engine
        ):
            async with Pair(settings_of(engine)) as pair:
                everything = tuple((token_id,) for token_id in range(512))
                later = tuple((first, last) for first in (0, 1) for last in range(512))
                for bad in (everything, later):
                    barred = replace(GREEDY, bad_token_ids=bad, logit_bias=((0, 100.0),))
                    with pytest.raises(InvalidRequest, match=r"sampling\.bad_words leaves no token"):
                        await pair.generate(PROMPT, COUNT, plan, sampling=barred)
                await pair.assert_nothing_held()
    for engine in ENGINES:
        with subtests.test("ids outside the vocabulary are refused", engine=engine):
            async with Pair(settings_of(engine)) as pair:
                for fields in ({"logit_bias": ((512, 1.0),)}, {"bad_token_ids": ((1, 512),)}):
                    with pytest.raises(InvalidRequest, match="vocabulary's size 512"):
                        await pair.generate(PROMPT, plan=Plan.LOCAL, sampling=replace(GREEDY, **fields))


async def test_constraints_and_bans_hold_both(subtests):
    for plan, engine in itertools.product(Plan, ENGINES):
        with subtests.test(plan=plan, engine=engine):
            directory = str(tiny_checkpoint(tokenizer="bytes"))
            settings, prompt = replace(settings_of(engine), model=directory), tuple(range(10, 31))
            wanted = Constraint(ConstraintKind.REGEX, ("[ab]{6}",))
            a, b = Tokenizer(directory).encode("ab", special_tokens=False)
            sampling = SamplingParams(
                temperature=1.0, seed=3, constraint=wanted, bad_token_ids=((a, a), (b, b))
            )
            async with Pair(settings) as pair:
                answer = await pair.generate(prompt, COUNT, plan, sampling=sampling, eos_token_ids=(256,))
                assert answer.finished is FinishReason.STOP
                assert answer.tokens[:-1] in ([a, b] * 3, [b, a] * 3)
                barred = replace(sampling, bad_token_ids=((a,), (b,)))
                with pytest.raises(InvalidRequest, match=r"bad_words leaves .* beside sampling\.constraint"):
                    await pair.generate(prompt, COUNT, plan, sampling=barred, eos_token_ids=(256,))
                await pair.assert_nothing_held()
