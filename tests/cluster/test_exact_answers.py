"""Each of several answers is what a request alone gets with its seed; greedy ones are all the same."""

import asyncio

import pytest

from cluster.answers import answers_of, running_at
from cluster.harness import FakeCluster
from etcd.real_etcd import until
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.router.request.client_request import seed_of
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, TokenIds

PAGE = 16
SEED = 2**63 + 11


def cluster_of(etcd, architecture, name, plan, decode=(1,)):
    directory = tiny_checkpoint(architecture)
    return directory, FakeCluster(
        etcd,
        directory,
        name,
        decode=decode,
        plans=(plan,),
        engine="torch",
        self_check="off",
        model=str(directory),
        page_size=PAGE,
        index_block=PAGE,
        kv_pages=128,
        chunk_size=24,
        num_threads=1,
    )


def request_of(ids, max_tokens, *, seed=SEED, temperature=0.9, tenant="", **fields):
    sampling = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=0
    )
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=sampling, tenant=tenant, **fields)


async def check_alone(cluster, ids, answers, max_tokens):
    for index, answer in enumerate(answers):
        (alone,) = await answers_of(
            cluster, request_of(ids, max_tokens, seed=seed_of(SEED, index), tenant="t")
        )
        assert answer.token_ids == alone.token_ids, index
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    ("architecture", "plan"),
    [
        pytest.param("llama", "remote", marks=pytest.mark.exact),
        pytest.param("llama", "local", marks=pytest.mark.slow),
        pytest.param("mistral", "remote", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "remote", marks=pytest.mark.exact),
        pytest.param("qwen3_next", "local", marks=pytest.mark.slow),
    ],
)
async def test_each_is_that_of_a_request_alone(etcd_endpoint, cluster_name, architecture, plan):
    directory, cluster = cluster_of(etcd_endpoint, architecture, cluster_name, plan)
    async with cluster:
        ids = random_prompt(5 * PAGE + 3, seed=2)
        answers = await answers_of(cluster, request_of(ids, 20, n=5, conversation_id="c"))
        await check_alone(cluster, ids, answers, 20)
        usages = [answer.finish.usage for answer in answers]
        assert usages[0].computed_tokens == len(ids)
        assert all(usage.computed_tokens <= PAGE + 3 for usage in usages[1:])
        # The conversation goes on with any of them, and has lost nothing.
        ids_so_far = [*ids, *answers[3].token_ids, 5]
        (later,) = await answers_of(cluster, request_of(ids_so_far, 2, conversation_id="c"))
        assert later.finish.usage.HasField("drift_tokens") and later.finish.usage.drift_tokens == 0
        assert later.finish.usage.decode_prefix_len >= len(ids) + 20 - PAGE
        greedy = await answers_of(cluster, request_of(ids, 20, n=3, temperature=0))
        assert len({tuple(answer.token_ids) for answer in greedy}) == 1
        count_near_ties(reference_generation(directory, tuple(ids), 20), greedy[0].token_ids)
        best, *rest = await answers_of(cluster, request_of(ids, 20, n=2, best_of=5))
        ranked = sorted(answers, key=lambda answer: sum(answer.logprobs), reverse=True)  # all are as long
        assert [best.token_ids, rest[0].token_ids] == [answer.token_ids for answer in ranked[:2]]
        await cluster.assert_nothing_held()


@pytest.mark.parametrize(
    ("architecture", "plan"),
    [
        pytest.param("llama", "remote", marks=pytest.mark.exact),
        pytest.param("llama", "local", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "remote", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "local", marks=pytest.mark.exact),
    ],
)
async def test_sampled_answers_go_on_where_their_rank_dies(etcd_endpoint, cluster_name, architecture, plan):
    _, cluster = cluster_of(etcd_endpoint, architecture, cluster_name, plan, decode=(1, 1))
    async with cluster:
        ids = random_prompt(5 * PAGE + 3, seed=3)
        answers = {}
        asked = asyncio.create_task(answers_of(cluster, request_of(ids, 120, n=5), answers=answers))
        left = await running_at(cluster, 5)
        await until(lambda: len(answers) == 5)
        await cluster.stop_rank(f"{left.address.id.worker}/0")
        told = await asked
        assert all(len(set(answer.ranks)) == 2 for answer in told)
        later = [answer.finish.placements[1].usage for answer in told]
        assert sum(usage.decode_prefix_len < len(ids) // PAGE * PAGE for usage in later) == 1
        await check_alone(cluster, ids, told, 120)
        await cluster.assert_nothing_held()
