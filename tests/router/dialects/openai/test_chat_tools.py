"""Tools, calls and thinking in chat completions."""

import json
from typing import Any

import pytest

from router.http.backend import HI, FakeBackend, chat, events, finished, response
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import (
    ChatMessage,
    GenerateResponse,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

SCHEMA = {"type": "object", "properties": {"stadt": {"type": "string", "description": "für"}}}
F = {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g", "strict": True}}


async def asked(**body: Any) -> Any:
    backend = FakeBackend()
    assert (await chat(backend, **body)).status_code == 200
    return backend.requests[0].chat


async def test_tools_their_choice_and_past_calls_are_handed_on(subtests: pytest.Subtests) -> None:
    with subtests.test("tools are handed on"):
        given = await asked(tools=[F, G], tool_choice="required", parallel_tool_calls=False)
        assert list(given.tools) == [
            Tool(name="f", description="does", parameters=json.dumps(SCHEMA, ensure_ascii=False)),
            Tool(name="g", strict=True),
        ]
        assert given.tool_choice == ToolChoice(mode=ToolChoice.MODE_REQUIRED)
        assert given.HasField("parallel_tool_calls") and not given.parallel_tool_calls
    with subtests.test("a schema that allows anything is none that allows no arguments"):
        anything = {"type": "function", "function": {"name": "h", "parameters": {}}}
        assert list((await asked(tools=[anything])).tools) == [Tool(name="h", parameters="{}")]
    with subtests.test("the choice of tools"):
        assert (await asked(tools=[F], tool_choice="auto")).tool_choice.mode == ToolChoice.MODE_AUTO
        assert (await asked(tools=[F], tool_choice="none")).tool_choice.mode == ToolChoice.MODE_NONE
        named = {"type": "function", "function": {"name": "f"}}
        assert (await asked(tools=[F], tool_choice=named)).tool_choice == ToolChoice(name="f")
        nothing = await asked(tools=None, tool_choice=None, parallel_tool_calls=None)
        assert not nothing.tools and not nothing.HasField("tool_choice")
        assert not nothing.HasField("parallel_tool_calls")
    with subtests.test("past calls and results are handed on"):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        unlike = {"function": {"name": "g", "arguments": {"ä": 1}}}
        given = await asked(
            messages=[
                *HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [call, unlike],
                    "reasoning_content": "hm",
                },
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "7"},
                {"role": "assistant", "content": "7", "reasoning": "so", "tool_calls": None},
            ]
        )
        calls = [ToolCall(id="c1", name="f", arguments='{"a": 1}'), ToolCall(name="g", arguments='{"ä": 1}')]
        assert list(given.messages)[1:] == [
            ChatMessage(role="assistant", tool_calls=calls, reasoning="hm"),
            ChatMessage(role="tool", tool_call_id="c1", name="f", content="7"),
            ChatMessage(role="assistant", content="7", reasoning="so"),
        ]


def calling(index: int, id_: str, name: str, arguments: str) -> GenerateResponse:
    delta = ToolCallDelta(index=index, id=id_, name=name, arguments=arguments)
    return GenerateResponse(request_id="r1", token_ids=[1], tool_calls=[delta])


def thinking(text: str) -> GenerateResponse:
    return GenerateResponse(request_id="r1", reasoning=text, token_ids=[1])


def called() -> FakeBackend:
    """f({"a": 1}) in two pieces, and g({})."""
    end = finished(reason=common_pb2.FINISH_REASON_TOOL_CALLS)
    end.finish.usage.reasoning_tokens = 2
    return FakeBackend(
        thinking("h"),
        thinking("m"),
        calling(0, "c0", "f", '{"a"'),
        calling(0, "", "", ": 1}"),
        calling(1, "c1", "g", "{}"),
        end,
    )


CALLS = [
    {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


async def test_calls_are_answered_whole(subtests: pytest.Subtests) -> None:
    with subtests.test("calls are answered whole"):
        body = (await chat(called())).json()
        (choice,) = body["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "hm",
            "reasoning": "hm",
            "tool_calls": CALLS,
        }
        assert choice["finish_reason"] == "tool_calls" == body["isthmus"]["finish_reason"]
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    with subtests.test("content beside calls stays"):
        backend = FakeBackend(response("Look.", [1]), calling(0, "c", "f", "{}"), finished())
        message = (await chat(backend)).json()["choices"][0]["message"]
        assert message["content"] == "Look." and len(message["tool_calls"]) == 1
        assert "reasoning_content" not in message


async def test_calls_are_streamed_as_deltas(subtests: pytest.Subtests) -> None:
    with subtests.test("calls are streamed as deltas"):
        *chunks, last, done = events(await chat(called(), stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        f = {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
        g = {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}}
        assert deltas == [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "h", "reasoning": "h"},
            {"reasoning_content": "m", "reasoning": "m"},
            {"tool_calls": [f]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
            {"tool_calls": [g]},
        ]
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")
        assert done == "[DONE]"
    with subtests.test("tokens that say nothing yet make no chunk"):
        backend = FakeBackend(response("", [1]), response("", [2]), finished("a", [3]))
        chunks = events(await chat(backend, stream=True))
        assert len(chunks) == 3  # the role, the end, [DONE]


async def test_what_a_router_finds_wrong_is_named_as_the_body_has_it() -> None:
    for field, param in [
        ("chat.tools[3].parameters", "tools[3].function.parameters"),
        ("chat.tools", "tools"),
        ("chat.tool_choice.name", "tool_choice.function.name"),
        ("chat.messages[1].tool_calls[0].arguments", "messages[1].tool_calls[0].function.arguments"),
        ("chat.messages[1].tool_calls[0].id", "messages[1].tool_calls[0].id"),
    ]:
        answer = await chat(FakeBackend(InvalidRequest(field, "is wrong")))
        assert answer.json()["error"]["param"] == param
