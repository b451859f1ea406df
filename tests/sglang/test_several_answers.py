"""Several answers to one prompt: SGLang computes it once, and it crosses once."""

import grpc
import pytest

from cluster.answers import answers_of
from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import PAGE
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, TokenIds

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

ANSWER = 11
TAIL = 3


class Stubs:
    """As answers_of asks them."""

    def __init__(self, cluster):
        self.stubs = [cluster.stub]


def request_of(ids, temperature=0.0, **fields):
    sampling = SamplingParams(temperature=temperature, max_tokens=ANSWER, ignore_eos=True)
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


async def test_sampled_answers_differ_and_the_prompt_still_crosses_once(cluster):
    ids = random_ids(PAGE * 3 + TAIL, "several, sampled")
    answers = await answers_of(Stubs(cluster), request_of(ids, temperature=0.8, n=3), timeout=120)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    assert sum(answer.finish.usage.delta_tokens for answer in answers) == len(ids) + 2 * TAIL
    await cluster.until_idle()


async def test_the_best_cannot_be_told_without_log_probabilities(cluster):
    ids = random_ids(PAGE + TAIL, "several, best")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await answers_of(Stubs(cluster), request_of(ids, n=1, best_of=2), timeout=120)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.value.details().startswith("best_of ")
    await cluster.until_idle()
