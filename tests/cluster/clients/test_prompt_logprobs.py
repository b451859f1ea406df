"""These tests show what a client is told of its prompt's tokens: as the ranks compute it, once, wherever the
request goes."""

import asyncio

import grpc
import pytest

from cluster.harness import FakeCluster, ids_request, prompt_of
from etcd.real_etcd import until
from exactness.prompt_scores import prompt_scores
from services.engine.fake import continuation
from services.router.request import response_stream
from services.wire.isthmus.v1 import generation_pb2

PROMPT = prompt_of(5, 203)


def scored_request(start, num_top=1, max_tokens=4, **fields):
    request = ids_request(PROMPT, max_tokens, **fields)
    request.sampling.prompt_logprobs, request.sampling.prompt_logprobs_start = num_top, start
    return request


async def responses_to(cluster, request, into=None):
    responses = [] if into is None else into
    async for response in cluster.stubs[0].Generate(request, timeout=30):
        responses.append(response)
    return responses


def check(responses, start, num_top=1):
    """All of it before, or with, the first tokens of the first answer."""
    told = [token for response in responses for token in response.prompt_logprobs]
    first = max(1, start)
    assert [token.chosen.token_id for token in told] == list(PROMPT[first:])
    expected = list(prompt_scores(PROMPT, first, num_top).tokens())
    assert [(t.chosen.logprob, t.chosen.rank) for t in told] == [(e.logprob, e.rank) for e in expected]
    assert [[(o.token_id, o.logprob) for o in t.top] for t in told] == [list(e.top) for e in expected]
    telling = [response for response in responses if response.prompt_logprobs]
    assert all(response.index == 0 for response in telling)
    of_first = [response for response in responses if response.index == 0]
    assert of_first[: len(telling)] == telling
    assert not any(response.token_ids for response in telling[:-1])


async def test_it_is_told_whatever_is_cached_and_computed_is_what_was_asked_for(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, subtests
):
    for number, plans in enumerate([("remote",), ("local",)]):
        with subtests.test(plans=plans):
            monkeypatch.setattr(response_stream, "_PIECE", 1_000)
            async with FakeCluster(
                etcd_endpoint, model_dir, f"{cluster_name}-{number}", plans=plans, decode=(1,)
            ) as cluster:
                for start, num_top in ((0, 0), (0, 20), (100, 1), (202, 1)):
                    responses = await responses_to(cluster, scored_request(start, num_top))
                    check(responses, start, num_top)
                    if num_top == 20:  # more than a response has
                        assert not responses[0].token_ids and len(responses[0].prompt_token_ids) == len(
                            PROMPT
                        )
                        assert sum(len(t.top) for t in responses[0].prompt_logprobs) <= 1_000
                    usage = responses[-1].finish.usage
                    assert usage.reused_tokens + usage.computed_tokens == len(PROMPT)
                    assert usage.reused_tokens <= max(0, start - 1)
                    assert [i for r in responses for i in r.token_ids] == continuation(PROMPT, 4)
                assert usage.reused_tokens >= 192
                assert plans == ("local",) or usage.delta_tokens <= 16
                explained = await cluster.stubs[0].Explain(
                    generation_pb2.ExplainRequest(request=scored_request(100))
                )
                (chosen,) = (candidate for candidate in explained.candidates if candidate.chosen)
                computes = "prefill" if plans == ("remote",) else "decode"
                assert getattr(chosen, f"{computes}_resume_tokens") == 99
                (rank,) = (
                    s
                    for s in (await cluster.stubs[0].ListRanks(generation_pb2.ListRanksRequest())).ranks
                    if s.rank.worker.startswith(computes)
                )
                assert rank.trust == 1.0
                await cluster.assert_nothing_held()


async def test_the_first_of_several_tells_and_nonsense_is_refused(
    etcd_endpoint, model_dir, cluster_name, subtests
):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        with subtests.test("of several answers the first tells"):
            responses = await responses_to(cluster, scored_request(3, n=3))
            check(responses, 3)
            assert {response.index for response in responses} == {0, 1, 2}
            await cluster.assert_nothing_held()
        with subtests.test("what is not in the prompt is refused at the door"):
            for request in (scored_request(203), scored_request(0, 21)):
                for call in (
                    responses_to(cluster, request),
                    cluster.stubs[0].Explain(generation_pb2.ExplainRequest(request=request)),
                ):
                    with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.prompt_logprobs") as refused:
                        await call
                    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "plans", [("remote",), pytest.param(("local",), marks=pytest.mark.long)], ids="-".join
)
async def test_a_stream_that_moves_tells_once(etcd_endpoint, model_dir, cluster_name, plans):
    shape = {"decode": (1, 1), "fake_step_s": 0.01}
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, plans=plans, **shape) as cluster:
        responses = []
        asked = asyncio.create_task(responses_to(cluster, scored_request(9, max_tokens=80), into=responses))
        await until(lambda: sum(len(response.token_ids) for response in responses) > 10)
        left = next(r for n, r in cluster.ranks.items() if n.startswith("decode") and r.engine.load().running)
        await cluster.stop_rank(f"{left.address.id.worker}/0")
        await asked
        check(responses, 9)
        placements = responses[-1].finish.placements
        assert len(placements) == 2
        # Where it goes on nothing is computed for it that others hold.
        assert plans == ("local",) or placements[1].usage.reused_tokens >= 192
        assert [i for r in responses for i in r.token_ids] == continuation(PROMPT, 80)
