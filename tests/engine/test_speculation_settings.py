"""Who drafts, by what an operator says; and that it does, from the flag to the tokens."""

from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, core_of
from services.engine.fake import continuation
from services.engine.paged.drafts.drafter import Drafter
from services.engine.paged.drafts.drafting import NoDrafting
from services.engine.paged.drafts.model_drafter import ModelDrafter
from services.values.errors import ConfigError

DRAFTING = {"off": NoDrafting, "lookup": Drafter, "tree": Drafter, "draft": ModelDrafter}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "torch", "speculation": "draft"}, "--draft-model"),
        ({"engine": "sglang", "speculation": "lookup"}, "--engine-arg=--speculative-algorithm"),
        ({"speculation": "lookup", "draft_tokens": 0}, "--draft-tokens"),
        ({"speculation": "lookup", "draft_tokens": 65}, "--draft-tokens"),
    ],
)
def test_what_cannot_draft_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(FAKE, **changes)


@pytest.mark.parametrize("mode", DRAFTING)
async def test_answers_are_the_same_whoever_drafts(mode):
    settings = replace(FAKE, speculation=mode, fake_draft="agree:0.8")
    async with Pair(settings) as pair:
        assert type(core_of(pair.decode)._drafting) is DRAFTING[mode]
        prompt = [1, 2, 3]
        for _ in range(2):
            answer = await pair.generate(prompt, 60, cache_salt="a salt")
            assert answer.tokens == continuation(prompt, 60)
        await pair.assert_nothing_held()
