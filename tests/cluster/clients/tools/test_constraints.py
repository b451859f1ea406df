"""Constraints from the client's call to its text, over ranks that prefill, decode, speculate and die."""

import asyncio
import json
import logging
import re

import grpc
import pytest

from cluster.harness import FakeCluster, prompt_of
from etcd.real_etcd import until
from exactness.checkpoints import tiny_checkpoint
from services.wire.isthmus.v1 import common_pb2, generation_pb2

STOP = common_pb2.FINISH_REASON_STOP
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 6, "maxItems": 9},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
)


def asked(number: int, constraint: common_pb2.Constraint, **sampling) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[i % 250 for i in prompt_of(number)]),
        sampling=common_pb2.SamplingParams(max_tokens=200, constraint=constraint, seed=number, **sampling),
        tenant="t",
    )


async def answer(cluster, request):
    text = ""
    async for response in cluster.stubs[0].Generate(request, timeout=60):
        text += response.text
    return text, response.finish


def with_model(etcd, name, engine="fake", **settings):
    directory = tiny_checkpoint(tokenizer="bytes")
    ranks = {"engine": engine, "model": str(directory), "num_threads": 1, "self_check": "off", **settings}
    return FakeCluster(etcd, directory, name, **ranks)


def check(text: str, finish: generation_pb2.Finish) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "sizes"]
    assert len(value["name"]) <= 12 and 6 <= len(value["sizes"]) <= 9
    assert finish.reason == STOP and finish.matched_stop


def running_on(cluster):
    return [name for name in ("decode-0/0", "decode-1/0") if cluster.ranks[name].engine.load().running]


@pytest.mark.parametrize("speculation", ["tree", pytest.param("off", marks=pytest.mark.long)])
async def test_answers_are_whole_also_where_their_rank_dies(etcd_endpoint, cluster_name, speculation, caplog):
    cluster = with_model(
        etcd_endpoint, cluster_name, decode=(1, 1), fake_step_s=0.01, speculation=speculation
    )
    requests = [asked(number, common_pb2.Constraint(json_schema=SCHEMA)) for number in range(6)]
    async with cluster:
        undisturbed = [await answer(cluster, request) for request in requests]
        running = [asyncio.create_task(answer(cluster, request)) for request in requests]
        busy = []  # what is cached after the first time decides which
        await until(lambda: busy.extend(running_on(cluster)) or busy)
        await cluster.stop_rank(busy[0])
        for before, task in zip(undisturbed, running, strict=True):
            text, finish = await task
            check(text, finish)
            assert text == before[0]
        assert f"left={busy[0]}" in caplog.text
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("plan", ["remote", pytest.param("local", marks=pytest.mark.long)])
async def test_what_the_torch_engine_says_is_whole(etcd_endpoint, cluster_name, plan, spans, caplog):
    caplog.set_level(logging.INFO)
    cluster = with_model(etcd_endpoint, cluster_name, "torch", plans=(plan,), decode=(1,), speculation="tree")
    async with cluster:
        for number in range(3):
            check(*await answer(cluster, asked(number, common_pb2.Constraint(json_schema=SCHEMA))))
        text, finish = await answer(cluster, asked(0, common_pb2.Constraint(regex="[a-f]{3}"), stop=["b"]))
        assert len(text) == 3 or finish.matched_stop == "b"
        choice = common_pb2.Choice(texts=["left", "right"])
        text, finish = await answer(cluster, asked(1, common_pb2.Constraint(choice=choice)))
        assert text in choice.texts and finish.reason == STOP
        assert 0 < finish.usage.constraint_s <= finish.stages.decode_queue_s
        counts = cluster.ranks["decode-0/0"].engine.load().constraints
        assert counts.requests == 5 and counts.compiled == 3
        kinds = ["json_schema"] * 3 + ["regex", "choice"]
        assert re.findall(r"\bconstraint=(\S+)", "\n".join(caplog.messages)) == kinds
        told = [
            span.attributes.get("constraint")
            for span in spans.get_finished_spans()
            if span.name == "router.generate"
        ]
        assert told == kinds
        assert counts.compile_s > 0 and counts.mask_s > 0 and counts.masked_tokens > 30
        await cluster.assert_nothing_held()


async def test_what_cannot_be_kept_to_is_refused_at_the_door(etcd_endpoint, cluster_name):
    async with with_model(etcd_endpoint, cluster_name) as cluster:
        explain = generation_pb2.ExplainRequest
        for fields, problem in (
            (
                {"json_schema": '{"uniqueItems": true}'},
                'json_schema is not supported: Unimplemented keys: ["uniqueItems"]',
            ),
            ({"grammar": "start: <|no|>"}, "grammar is not supported"),
        ):
            request = asked(1, common_pb2.Constraint(**fields))
            for call in (answer(cluster, request), cluster.stubs[0].Explain(explain(request=request))):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert problem in refused.value.details()
        for beside in ({"min_tokens": 1}, {"ignore_eos": True}):
            with pytest.raises(grpc.aio.AioRpcError, match="beside a constraint"):
                await answer(cluster, asked(1, common_pb2.Constraint(regex="a"), **beside))
        await cluster.assert_nothing_held()
