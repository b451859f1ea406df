"""Every sampling parameter does its work at the far end: the first token on prefill, the rest on decode.

One cluster for all of them, with both plans; what each parameter does exactly is tests/engine's business.
"""

import asyncio
import math

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from cluster.harness import FakeCluster
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt
from exactness.ruled import Rules, ruled_generation
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1 import common_pb2, generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = random_prompt(30, seed=5)
EOS_ID = 1
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["remote", pytest.param("local", marks=pytest.mark.long)]
)
async def cluster(request, etcd_endpoint):
    directory = tiny_checkpoint()
    async with FakeCluster(
        etcd_endpoint,
        directory,
        f"sampling-{request.param}",
        decode=(1,),
        plans=(request.param,),
        engine="torch",
        model=str(directory),
        num_threads=1,
    ) as cluster:
        yield cluster
        await cluster.assert_nothing_held()


async def sample(cluster, max_tokens=16, **sampling):
    """(ids, logprobs, finish)"""
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling}),
    )
    ids, logprobs = [], []
    async for response in cluster.stubs[0].Generate(request, timeout=60):
        ids += response.token_ids
        logprobs += response.logprobs
    return ids, logprobs, response.finish


async def ids_of(cluster, max_tokens=16, **sampling):
    return (await sample(cluster, max_tokens, **sampling))[0]


async def test_one_token_or_chance_and_what_counts_of_what_was_said(cluster, subtests):
    with subtests.test("whatever leaves one token is greedy"):
        greedy = await ids_of(cluster, temperature=0)
        for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
            assert await ids_of(cluster, temperature=5, seed=1, **narrow) == greedy
        assert await ids_of(cluster, temperature=5, seed=1) != greedy
    with subtests.test("a seed repeats itself and no seed does not"):
        hot = {"temperature": 5}
        assert await ids_of(cluster, seed=7, **hot) == await ids_of(cluster, seed=7, **hot)
        assert await ids_of(cluster, seed=7, **hot) != await ids_of(cluster, seed=8, **hot)
        assert await ids_of(cluster, **hot) != await ids_of(cluster, **hot)
    with subtests.test("penalties count what was said"):
        # The repetition penalty counts the prompt as well: it crushes the logits of its ids,
        # which are not said again.
        plain = await ids_of(cluster, 40, temperature=0)
        assert len(set(plain)) < len(plain) and set(plain) & set(PROMPT)  # there is something to penalize
        crushed = await ids_of(cluster, 40, temperature=0, repetition_penalty=100)
        assert len(set(crushed)) == len(crushed) and not set(crushed) & set(PROMPT)
        # These two count the answer only, so that the first token, which prefill chooses, stays.
        for name in ("frequency_penalty", "presence_penalty"):
            penalized, rewarded = [
                await ids_of(cluster, 40, temperature=0, **{name: penalty}) for penalty in (2, -2)
            ]
            assert penalized[0] == rewarded[0] == plain[0]
            assert len(set(penalized)) > len(set(rewarded))
    with subtests.test("biases and bad words are heeded from the first token on"):
        directory = tiny_checkpoint()
        plain = await ids_of(cluster, temperature=0)
        first, then = (Tokenizer(str(directory)).text_of([token_id]) for token_id in (plain[0], plain[5]))
        biases = {plain[3]: -100.0, 77: 2.5}
        rules = Rules(biases, ((plain[0],), (plain[5],)))
        expected = ruled_generation(directory, PROMPT, 16, rules)
        assert plain[0] not in expected != plain
        assert await ids_of(cluster, temperature=0, logit_bias=biases, bad_words=[first, then]) == expected
    with subtests.test("ids that no model has are refused at the door"):
        for field in [{"logit_bias": {512: 1.0}}, {"bad_token_ids": [{"ids": [3, 512]}]}]:
            with subtests.test(field=field):
                (name,) = field
                with pytest.raises(grpc.aio.AioRpcError, match=rf"sampling\.{name} must be .* size 512"):
                    await ids_of(cluster, **field)


async def test_logprobs(cluster, subtests):
    with subtests.test("logprobs come with every token"):
        for sampling in [{"temperature": 0}, {"temperature": 5, "seed": 3}]:
            with subtests.test(sampling=sampling):
                ids, logprobs, _ = await sample(cluster, logprobs=4, **sampling)
                assert ids == await ids_of(cluster, **sampling)  # asking changes nothing
                assert [entry.chosen.token_id for entry in logprobs] == ids
                for entry in logprobs:
                    top = [(-other.logprob, other.token_id) for other in entry.top]
                    assert len(top) == 4 and top == sorted(top)
                    assert sum(math.exp(other.logprob) for other in entry.top) <= 1 + 1e-6
                    assert entry.chosen.logprob <= entry.top[0].logprob <= 0
                    if sampling["temperature"] == 0:
                        assert entry.top[0] == entry.chosen
                _, only_chosen, _ = await sample(cluster, logprobs=0, **sampling)
                assert [entry.chosen.token_id for entry in only_chosen] == ids
                # Computed again, from what is cached by now, a number may differ in its last bits.
                again = [entry.chosen.logprob for entry in only_chosen]
                assert again == pytest.approx([entry.chosen.logprob for entry in logprobs], abs=1e-4)
                assert not any(entry.top for entry in only_chosen)
                assert (await sample(cluster, **sampling))[1] == []
    with subtests.test("an answer that is scored as a prompt is as probable"):
        # And the most probable at each token, as lm-eval reads that.
        ids, logprobs, _ = await sample(cluster, temperature=0, logprobs=1)
        body = {"prompt": [*PROMPT, *ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        router = f"http://127.0.0.1:{cluster.routers[0].http_port}"
        async with httpx.AsyncClient(base_url=router, timeout=60) as http:
            answer = await http.post("/v1/completions", json=body)
        told = answer.json()["choices"][0]["logprobs"]
        scored = told["token_logprobs"][len(PROMPT) : -1]
        assert scored == pytest.approx([entry.chosen.logprob for entry in logprobs], abs=1e-4)
        best = [max(top.values()) for top in told["top_logprobs"][len(PROMPT) : -1]]
        assert scored == best


async def test_an_answer_ends_where_it_is_to(cluster, subtests):
    with subtests.test("stop tokens end it but not before min tokens"):
        greedy = await ids_of(cluster, 24, temperature=0)
        for at in (0, 5):
            stop = greedy[at]
            end = greedy.index(stop) + 1
            ids, _, finish = await sample(cluster, 24, temperature=0, stop_token_ids=[stop])
            assert (ids, finish.reason) == (greedy[:end], STOP)
            assert finish.matched_stop == Tokenizer(str(tiny_checkpoint())).token_text(stop)
            # Until then the stop token is not chosen at all, and something else is.
            ids, _, _ = await sample(cluster, 24, temperature=0, stop_token_ids=[stop], min_tokens=end + 3)
            assert len(ids) >= end + 3
            assert stop not in ids[: end + 3]
            assert ids[: end - 1] == greedy[: end - 1]
    with subtests.test("the end of sequence ends it unless ignored"):
        # Its logit is so low that only heat brings it about, and with few seeds (here 8).
        seeds = range(12)
        hot = await asyncio.gather(*(ids_of(cluster, 40, temperature=100, seed=seed) for seed in seeds))
        (seed, ids), *_ = [(seed, ids) for seed, ids in zip(seeds, hot, strict=True) if EOS_ID in ids]
        assert len(ids) == 40
        end = ids.index(EOS_ID) + 1
        ended, _, finish = await sample(cluster, 40, temperature=100, seed=seed, ignore_eos=False)
        assert (ended, finish.reason) == (ids[:end], STOP)
        later, _, _ = await sample(
            cluster, 40, temperature=100, seed=seed, ignore_eos=False, min_tokens=end + 1
        )
        assert len(later) > end and EOS_ID not in later[: end + 1]
    with subtests.test("max tokens is exact"):
        greedy = await ids_of(cluster, 24, temperature=0)
        for max_tokens in (1, 2, 24):
            ids, _, finish = await sample(cluster, max_tokens, temperature=0)
            assert (ids, finish.reason) == (greedy[:max_tokens], LENGTH)
