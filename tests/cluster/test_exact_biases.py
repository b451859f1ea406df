"""Random biases and bans through whole clusters: what transformers generates under the same rules."""

import random

import pytest

from cluster.test_exact import Case, cluster_of
from engine.paged.draft_ranks import every_draft_pays
from exactness.reference import random_prompt
from exactness.ruled import Rules, ruled_generation
from services.wire.isthmus.v1 import common_pb2, generation_pb2

pytestmark = [pytest.mark.exact, pytest.mark.usefixtures(every_draft_pays.__name__)]

COUNT = 32


def random_rules(directory, prompt, chance):
    """That change the answer, each where the ones before have left it."""
    rules = Rules()
    for _ in range(6):
        answer = ruled_generation(directory, prompt, COUNT, rules)
        if chance.random() < 0.5:
            bias = chance.choice((-100.0, -1.0, -0.25))
            rules = Rules(
                {**rules.biases, chance.choice(answer): bias, chance.randrange(512): 0.5}, rules.bad
            )
        else:
            end = chance.randrange(1, COUNT)
            rules = Rules(rules.biases, (*rules.bad, tuple(answer[max(0, end - chance.randint(1, 4)) : end])))
    return rules


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", ["remote", "local"])
@pytest.mark.parametrize("speculation", ["off", "lookup", "draft"])
async def test_answers_are_the_oracles(etcd_endpoint, cluster_name, plan, speculation, seed):
    case = Case("llama", 4, 24, 0, "on", plan, speculation)
    cluster, directory = cluster_of(etcd_endpoint, case, cluster_name)
    prompt = list(random_prompt(40, seed=seed)) * 2
    rules = random_rules(directory, prompt, random.Random(seed))
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(
            temperature=0,
            max_tokens=COUNT,
            ignore_eos=True,
            logit_bias=rules.biases,
            bad_token_ids=[common_pb2.TokenSequence(ids=ids) for ids in rules.bad],
        ),
    )
    async with cluster:
        for _ in range(2):  # the second finds what the first has said
            call = cluster.stubs[0].Generate(request, timeout=60)
            ids = [token_id async for response in call for token_id in response.token_ids]
            assert ids == ruled_generation(directory, prompt, COUNT, rules)
        await cluster.assert_nothing_held()
