import pytest

from bench.chaos.oracle import FakeOracle, Oracle
from exactness.checkpoints import tiny_checkpoint
from exactness.plain_sampling import sample_row
from exactness.reference import random_prompt, reference_generation
from services.engine.fake import continuation
from services.engine.paged.model_runner import Chunk
from services.values.request import SamplingParams

pytestmark = pytest.mark.long


PROMPT = random_prompt(30, 3)


@pytest.fixture(scope="module")
def oracle():
    return Oracle(tiny_checkpoint())


def sampled(oracle, seed):
    tokens = ()
    for _ in range(12):
        history = [*PROMPT, *tokens]
        chunk = Chunk([0], 0, [0], True, SamplingParams(temperature=0.7, seed=seed), history, len(tokens), ())
        tokens += (sample_row(oracle._logits(history)[-1], chunk).token_id,)
    return tokens


def test_right_tokens(subtests, oracle):
    with subtests.test("what transformers generates is right and one other token is not"):
        tokens = reference_generation(tiny_checkpoint(), PROMPT, 20).token_ids
        assert oracle.check(PROMPT, tokens, 0.0, 1).wrong_at is None
        assert oracle.check(PROMPT, tokens[:5], 0.0, 1).num_tokens == 5
        spoilt = (*tokens[:7], (tokens[7] + 1) % 500, *tokens[8:])
        assert oracle.check(PROMPT, spoilt, 0.0, 1).wrong_at == 7
        assert oracle.check(PROMPT, (), 0.0, 1).wrong_at is None
    with subtests.test("what plain sampling draws is right and another seed is not"):
        tokens = sampled(oracle, 11)
        assert oracle.check(PROMPT, tokens, 0.7, 11).wrong_at is None
        assert oracle.check(PROMPT, tokens, 0.7, 12).wrong_at is not None
        spoilt = (*tokens[:4], (tokens[4] + 1) % 500, *tokens[5:])
        assert oracle.check(PROMPT, spoilt, 0.7, 11).wrong_at == 4
    with subtests.test("the fake engine has one right token"):
        tokens = continuation(PROMPT, 10)
        assert FakeOracle().check(PROMPT, tokens, 1.0, 5).wrong_at is None
        tokens[6] += 1
        assert FakeOracle().check(PROMPT, tokens, 1.0, 5).wrong_at == 6
