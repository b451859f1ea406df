"""Tools from the client's call to the model's, and back with their results, over real routers and ranks."""

import json

import httpx
import pytest

from cluster.harness import FakeCluster
from services.cli.model.make_model import make_model
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import (
    Chat,
    ChatMessage,
    ExplainRequest,
    GenerateRequest,
    Tool,
    ToolCall,
    ToolChoice,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "Is it warm?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tools") / "model"
    make_model(directory, tokenizer="bytes", chat_template="tools")
    return directory


def check(arguments):
    value = json.loads(arguments)
    assert {"city", "unit"} <= set(value) <= set(SCHEMA["properties"])
    assert len(value["city"]) <= 12 and value["unit"] in ("C", "F")


async def asked(http, **body):
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 3000, **body}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_tool_that_must_be_called_is(etcd_endpoint, cluster_name, model):
    ranks = {"engine": "fake", "model": str(model)}
    cluster = FakeCluster(etcd_endpoint, model, cluster_name, decode=(1,), **ranks)
    async with cluster:
        url = f"http://127.0.0.1:{cluster.routers[0].http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for seed in range(3):
                (whole,) = (await asked(http, seed=seed)).json()["choices"]
                assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
                calls = whole["message"]["tool_calls"]
                for call in calls:
                    assert call["function"]["name"] == "weather"
                    check(call["function"]["arguments"])
                assert await streamed(http, seed) == [call["function"] for call in calls]

            one = (await asked(http, parallel_tool_calls=False, temperature=0)).json()["choices"][0]
            (call,) = one["message"]["tool_calls"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "21"}]
            again = await asked(http, messages=[*HI, one["message"], *results])
            assert again.json()["choices"][0]["finish_reason"] == "tool_calls"
        await by_grpc(cluster)
        await cluster.assert_nothing_held()


async def streamed(http, seed):
    """The functions that are called, put together as clients do."""
    lines = (await asked(http, seed=seed, stream=True)).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    functions = {}
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            function = functions.setdefault(delta["index"], {"name": "", "arguments": ""})
            for key, piece in delta["function"].items():
                function[key] += piece
    return [functions[index] for index in range(len(functions))]


async def by_grpc(cluster):
    tool = Tool(name="weather", parameters=json.dumps(SCHEMA))
    chat = Chat(
        messages=[ChatMessage(role="user", content="Is it warm?")],
        tools=[tool],
        tool_choice=ToolChoice(name="weather"),
        parallel_tool_calls=False,
    )
    request = GenerateRequest(chat=chat, sampling=SamplingParams(max_tokens=600, seed=1))
    responses = [each async for each in cluster.stubs[0].Generate(request, timeout=60)]
    (call,) = [call for response in responses for call in response.tool_calls]
    assert call.name == "weather" and call.id.startswith("call_")
    check(call.arguments)
    assert not any(response.text for response in responses)
    assert responses[-1].finish.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    await explained(cluster, request, call)


async def explained(cluster, request, call):
    called = ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    request.chat.messages.add(role="assistant", tool_calls=[called])
    request.chat.messages.add(role="tool", tool_call_id=call.id, content="21")
    told = await cluster.stubs[0].Explain(ExplainRequest(request=request))
    assert told.constraint == "grammar" and dict(told.past_answers) == {"found": 1}
    request.chat.ClearField("tool_choice")
    told = await cluster.stubs[0].Explain(ExplainRequest(request=request))
    assert not told.constraint
