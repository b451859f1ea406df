"""Several answers to one prompt: SGLang computes it once, and it crosses once."""

import pytest

from cluster.answers import answers_of
from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import PAGE
from services.router.request.answers.seeds import seed_of
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, TokenIds

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER = 11
TAIL = 3


class Stubs:
    """As answers_of asks them."""

    def __init__(self, cluster):
        self.stubs = [cluster.stub]


def request_of(ids, seed=7, temperature=0.0, **fields):
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=ANSWER, ignore_eos=True)
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=sampling, **fields)


async def test_a_prompt_is_computed_once_and_crosses_once(cluster):
    ids = random_ids(PAGE * 6 + TAIL, "several")
    answers = await answers_of(Stubs(cluster), request_of(ids, n=4), timeout=120)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    usages = [answer.finish.usage for answer in answers]
    assert [usage.decode_prefix_len for usage in usages] == [0] + 3 * [PAGE * 6]
    assert [usage.delta_tokens for usage in usages] == [len(ids)] + 3 * [TAIL]
    assert [usage.computed_tokens for usage in usages] == [len(ids)] + 3 * [TAIL]
    assert len({answer.finish.placement.decode.rank for answer in answers}) == 1
    await cluster.until_idle()


async def test_each_sampled_answer_is_that_of_a_request_alone(cluster):
    ids = random_ids(PAGE * 3 + TAIL, "several, sampled")
    answers = await answers_of(Stubs(cluster), request_of(ids, temperature=0.8, n=3), timeout=120)
    for index, answer in enumerate(answers):
        alone = request_of(ids, seed_of(7, index), temperature=0.8)
        (same,) = await answers_of(Stubs(cluster), alone, timeout=120)
        assert same.token_ids == answer.token_ids
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    await cluster.until_idle()
