"""Whatever a request asks for, each response is that of a cluster whose ranks do not speculate, to the bit.

Only how many tokens come at once may differ, and what usage says of drafts. tests/engine/torch/paired has the
families.
"""

import pytest

from cluster.harness import FakeCluster
from engine.paged.draft_ranks import every_draft_pays
from exactness.checkpoints import tiny_checkpoint
from exactness.draft_checkpoints import grown_checkpoint
from exactness.reference import random_prompt
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1 import common_pb2, generation_pb2

pytestmark = [pytest.mark.exact, pytest.mark.usefixtures(every_draft_pays.__name__)]

PROMPT, ANSWER = random_prompt(40, seed=5), 24
SAMPLINGS = [{"temperature": 0}, {"temperature": 0.4, "top_p": 0.95, "seed": 7}]
STOP = common_pb2.FINISH_REASON_STOP


async def answer(cluster, max_tokens=ANSWER, **sampling):
    """Its ids, log probabilities, text and finish; and how many drafts were right."""
    params = common_pb2.SamplingParams(
        **{"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2, **sampling}
    )
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT), sampling=params, tenant="tenant"
    )
    ids, logprobs, text = [], [], ""
    async for response in cluster.stubs[0].Generate(request, timeout=60):
        ids += response.token_ids
        logprobs += [str(entry) for entry in response.logprobs]
        text += response.text
    usage, finish = response.finish.usage, response.finish
    hits = usage.decode_prefix_len, usage.prefill_prefix_len, usage.delta_tokens, usage.kv_bytes_moved
    said = ids, logprobs, text, finish.reason, finish.matched_stop, usage.completion_tokens, hits
    return said, usage.accepted_draft_tokens


def limits(ids, text_of):
    """Beside what is drawn how: an answer as it is, and what ends one earlier or makes it another one."""
    yield {}
    for at in (4, 11):
        yield {"stop": [text_of(ids[at : at + 2])]}
        yield {"stop": [text_of(ids[at : at + 3]), "nowhere"], "min_tokens": at + 5}
        yield {"stop_token_ids": [ids[at]]}
        yield {"stop_token_ids": [ids[at]], "min_tokens": at + 5}
        yield {"max_tokens": at}
    yield from ({name: 1.2} for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"))


async def answers(etcd, name, mode, plan):
    directory = grown_checkpoint(gain=2.0)
    tokenizer = Tokenizer(str(directory))
    ranks = {"engine": "torch", "num_threads": 1, "self_check": "off", "page_size": 16, "index_block": 16}
    models = {"model": str(directory), "draft_model": str(tiny_checkpoint())}
    cluster = FakeCluster(
        etcd, directory, f"{name}-{mode}", decode=(1,), plans=(plan,), speculation=mode, **ranks, **models
    )
    said, accepted = [], 0
    async with cluster:
        for sampling in SAMPLINGS:
            (ids, *_), _ = await answer(cluster, **sampling)
            for limit in limits(ids, lambda some: "".join(map(tokenizer.token_text, some))):
                each, right = await answer(cluster, **sampling, **limit)
                said.append(each)
                accepted += right
        await cluster.assert_nothing_held()
    return said, accepted


@pytest.mark.parametrize("plan", ["remote", "local"])
async def test_responses_are_those_without_speculation(etcd_endpoint, cluster_name, plan):
    plain, none = await answers(etcd_endpoint, cluster_name, "off", plan)
    assert none == 0
    assert all(text for _, _, text, *_ in plain)
    assert sum(reason == STOP for _, _, _, reason, *_ in plain) == sum(bool(said[4]) for said in plain) >= 12
    for mode in ("lookup", "tree", "draft"):
        drafted, accepted = await answers(etcd_endpoint, cluster_name, mode, plan)
        assert drafted == plain
        assert mode == "lookup" or accepted > 100
