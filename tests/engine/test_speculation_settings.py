"""These tests show who drafts, by what an operator says; and that it does, from the flag to the tokens."""

from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, core_of
from services.engine.fake import continuation
from services.engine.paged.drafters import Drafter, ModelDrafter
from services.values.errors import ConfigError

SOURCES = {
    "off": set(),
    "lookup": set(),
    "tree": {"tree"},
    "draft": {"draft"},
}  # its text repeats nothing
DRAFTING = {"off": type(None), "lookup": Drafter, "tree": Drafter, "draft": ModelDrafter}


def test_what_cannot_draft_is_refused(subtests):
    for changes, words in [
        ({"engine": "torch", "speculation": "draft"}, "--draft-model"),
        ({"engine": "sglang", "speculation": "lookup"}, "--engine-arg=--speculative-algorithm"),
        ({"engine": "sglang", "draft_model": "x"}, "--engine-arg=--speculative-draft-model-path"),
        ({"engine": "fake", "draft_model": "x"}, "--draft-model is for --engine=torch"),
        ({"engine": "sglang", "kv_dtype": "fp8_e4m3"}, "--engine-arg=--kv-cache-dtype"),
        ({"engine": "fake", "kv_dtype": "fp8_e4m3"}, "--kv-dtype is for --engine=torch"),
        ({"speculation": "lookup", "draft_tokens": 0}, "--draft-tokens"),
        ({"speculation": "lookup", "draft_tokens": 65}, "--draft-tokens"),
    ]:
        with subtests.test(changes=changes), pytest.raises(ConfigError, match=words):
            replace(FAKE, **changes)


async def test_beside_a_target_a_draft_catches_up_by_little(subtests):
    for target_ms, tokens in [(None, 256), (40.0, 64)]:
        with subtests.test(target_ms=target_ms):
            settings = replace(FAKE, fake_draft="agree:1", chunk_size=256, itl_target_ms=target_ms)
            async with Pair(settings) as pair:
                assert core_of(pair.decode).runner.draft._settings.catch_up_tokens == tokens


def helped_of(pair):
    return {count.source for count in pair.decode.load().drafts if count.accepted}


async def answer_the_same(mode):
    settings = replace(FAKE, speculation=mode, fake_draft="agree:0.8")
    async with Pair(settings) as pair:
        assert type(core_of(pair.decode)._drafting) is DRAFTING[mode]
        prompt, told = [1, 2, 3], []
        for number in range(20):
            # Where a verifying step took long none follows for a while, so one answer more may be due.
            if number > 1 and (helped_of(pair) or not SOURCES[mode]):
                break
            async with pair.outputs(pair.request(prompt, 60, cache_salt="a salt")) as outputs:
                said = [output async for output in outputs]
            assert [token_id for output in said for token_id in output.token_ids] == continuation(prompt, 60)
            told += said
        load = pair.decode.load()
        assert sum(output.drafted_tokens for output in told) == load.drafted_tokens
        assert sum(output.accepted_draft_tokens for output in told) == load.accepted_draft_tokens
        # What the tree knew for longer the n-grams of its salt may be asked for, as the steps' times have it.
        helped = helped_of(pair)
        assert helped - {"ngrams"} == SOURCES[mode]
        # How much is up to those times, too.
        assert (load.tokens_per_step > 1.0) == bool(helped)
        await pair.assert_nothing_held()


async def test_answers_are_the_same_whoever_drafts(subtests):
    for mode in DRAFTING:
        with subtests.test(mode=mode):
            await answer_the_same(mode)
