"""Whatever is asked for, every answer that stops is it: of a random model, drafted for, over P/D."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paged.draft_ranks import every_draft_pays
from engine.pair import FAKE, Pair
from exactness.checkpoints import tiny_checkpoint
from grammar.drawn_constraints import Drawn, drawn_constraints
from grammar.written import text_of
from services.grammar.vocabulary import read_vocabulary
from services.values.errors import InvalidRequest
from services.values.rank import Plan
from services.values.request import FinishReason, SamplingParams

EOS_ID, MAX_TOKENS = 256, 150
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**32),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
asked = st.lists(st.tuples(drawn_constraints, samplings, st.sampled_from(Plan)), min_size=1, max_size=6)


@pytest.mark.usefixtures(every_draft_pays.__name__)
@pytest.mark.parametrize("engine", ["fake", "torch"])
def test_every_answer_that_stops_is_what_was_asked_for(engine):
    tried = _try(engine, examples=8)
    assert tried["stopped"] > 10 and tried["drafted"] > 0


@pytest.mark.exact
@pytest.mark.timeout(900)
@pytest.mark.usefixtures(every_draft_pays.__name__)
@pytest.mark.parametrize("engine", ["fake", "torch"])
def test_very_many_answers(engine):
    tried = _try(engine, examples=80)
    assert tried["stopped"] > 100 and tried["drafted"] > 20


def _try(engine, examples):
    tried = {"stopped": 0, "drafted": 0}
    directory = tiny_checkpoint(tokenizer="bytes")
    vocabulary = read_vocabulary(directory, 259)
    ranks = replace(FAKE, engine=engine, model=str(directory), kv_pages=512, speculation="tree")
    with asyncio.Runner() as runner:
        pair = Pair(ranks)
        runner.run(pair.__aenter__())

        async def together(requests):
            return await asyncio.gather(*(_ask(pair, *request) for request in requests))

        @settings(max_examples=examples)
        @given(asked)
        def check(requests):
            for (drawn, *_), answer in zip(requests, runner.run(together(requests)), strict=True):
                if answer is None or answer.finished is not FinishReason.STOP:
                    continue
                tried["stopped"] += 1
                assert answer.tokens[-1] == EOS_ID
                text = text_of(vocabulary, answer.tokens[:-1])
                assert drawn.is_kept(text), (drawn.constraint, text)

        try:
            check()
            tried["drafted"] = sum(count.drafted for count in pair.decode.load().drafts)
            runner.run(pair.assert_nothing_held())
        finally:
            runner.run(pair.__aexit__(None, None, None))
    return tried


async def _ask(pair: Pair, drawn: Drawn, sampling: SamplingParams, plan: Plan):
    """None: it cannot be kept to, and says so by its name."""
    sampling = replace(sampling, constraint=drawn.constraint)
    fields = {"sampling": sampling, "eos_token_ids": (EOS_ID,), "cache_salt": "tenant"}
    try:
        return await pair.generate(range(40, 61), MAX_TOKENS, plan, **fields)
    except InvalidRequest as error:
        assert str(error).startswith(f"{drawn.constraint.field_name} is not supported: "), drawn
        return None
