"""Constraints on real SGLang: a schema, a pattern, a grammar and a choice, over prefill and decode."""

import json
import re

import pytest
import pytest_asyncio

from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import SglangCluster
from services.cli.model.make_model import make_model
from services.wire.isthmus.v1 import common_pb2, generation_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "sizes": {"enum": [[], [1], [1, 2]]}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def byte_cluster(tmp_path_factory):
    """Its model's tokenizer is one that SGLang's grammars can use."""
    model = tmp_path_factory.mktemp("bytes")
    make_model(model, tokenizer="bytes")
    async with SglangCluster(model, tmp_path_factory.mktemp("cluster")) as opened:
        yield opened


async def answer(cluster, number, temperature, **constraint):
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[i % 250 for i in random_ids(20, f"{number}")]),
        sampling=common_pb2.SamplingParams(
            temperature=temperature, max_tokens=80, constraint=common_pb2.Constraint(**constraint)
        ),
    )
    text = ""
    async for response in cluster.stub.Generate(request, timeout=300):
        text += response.text
    assert response.finish.reason == common_pb2.FINISH_REASON_STOP, (text, response.finish)
    return text


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_answers_are_whole(byte_cluster, temperature):
    for number in range(2):
        value = json.loads(await answer(byte_cluster, number, temperature, json_schema=json.dumps(SCHEMA)))
        assert list(value) == ["name", "sizes"] and value["sizes"] in SCHEMA["properties"]["sizes"]["enum"]
        text = await answer(byte_cluster, number, temperature, regex="[a-c]{2,4}-[0-9]")
        assert re.fullmatch("[a-c]{2,4}-[0-9]", text)
        gbnf = await answer(byte_cluster, number, temperature, grammar='root ::= "(" [xy] ")"\n')
        assert gbnf in ("(x)", "(y)")
        lark = await answer(byte_cluster, number, temperature, grammar='start: "<" /[0-9]/ ">"')
        assert re.fullmatch("<[0-9]>", lark)
        choice = common_pb2.Choice(texts=["yes", "no"])
        assert await answer(byte_cluster, number, temperature, choice=choice) in choice.texts
