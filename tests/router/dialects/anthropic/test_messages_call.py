"""Bodies of Anthropic's messages, and what they come to."""

import json
from typing import Any

import pytest

from router.http.backend import HI
from services.router.dialects.json_body import InvalidParameter
from services.router.dialects.messages_call import MessagesCall, read_messages_call
from services.wire.isthmus.v1.common_pb2 import Constraint, SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, Tool, ToolCall, ToolChoice

CALLED = {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}


def call_of(**body: Any) -> MessagesCall:
    return read_messages_call({"max_tokens": 64, "messages": HI, **body}, {})


def chat_of(**body: Any) -> Chat:
    return call_of(**body).request.chat


def test_a_tool_loop_comes_back_as_turns() -> None:
    chat = chat_of(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hmm.", "signature": "h1"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Bärn"}},
                    {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_a", "content": "rain"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_b",
                        "content": [{"type": "text", "text": "no clock"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
    )
    assert list(chat.messages) == [
        ChatMessage(role="system", parts=["Be brief."]),
        ChatMessage(role="user", parts=["Weather", "?"]),
        ChatMessage(
            role="assistant",
            content="Let me look.",
            reasoning="Hmm.",
            answer_id="h1",
            tool_calls=[
                ToolCall(id="call_a", name="weather", arguments='{"city": "Bärn"}'),
                ToolCall(id="call_b", name="time", arguments="{}"),
            ],
        ),
        ChatMessage(role="tool", tool_call_id="call_a", content="rain"),
        ChatMessage(role="tool", tool_call_id="call_b", content="Error: no clock"),
        ChatMessage(role="user", parts=["Go on."]),
    ]


TIME = {"name": "time", "description": "of day", "input_schema": {"type": "object"}, "defer_loading": True}
SHOWN = '<function>{"name": "time", "description": "of day", "parameters": {"type": "object"}}</function>'


def found(*names: str) -> list[Any]:
    """Claude Code's search for tools has been called, and has found these."""
    search = {"type": "tool_use", "id": "call_s", "name": "ToolSearch", "input": {"query": "time"}}
    content = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "call_s", "content": content}
    return [{"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]


def test_a_tool_that_is_loaded_later_is_shown_where_it_was_found() -> None:
    tools = [WEATHER, TIME, {**TIME, "name": "never_found"}]
    before = chat_of(tools=tools)
    assert [tool.name for tool in before.tools] == ["weather"]
    chat = chat_of(messages=[*HI, *found("time", "weather"), *found("time")], tools=tools)
    parameters = '{"type": "object"}'
    assert list(chat.tools) == [
        Tool(name="weather", description="d", parameters=parameters),
        Tool(name="time", description="of day", parameters=parameters, hidden=True),
    ]
    weather = '<function>{"name": "weather", "description": "d", "parameters": {"type": "object"}}</function>'
    again = '<function>{"name": "time"}</function>'
    assert [turn.content for turn in chat.messages if turn.role == "tool"] == [
        f"<functions>\n{SHOWN}\n{weather}\n</functions>",
        f"<functions>\n{again}\n</functions>",
    ]


def test_no_tool_waits_for_a_search_that_nobody_does() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    call = call_of(tools=[search, TIME])
    assert [(tool.name, tool.hidden) for tool in call.request.chat.tools] == [("time", False)]
    assert call.left_out == ("tool_search_tool_regex_20251119",)


def test_what_changes_or_is_not_ours_is_no_part_of_the_prompt(subtests: pytest.Subtests) -> None:
    for cch in ["a", "b"]:
        with subtests.test(cch=cch):
            billing = f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"
            blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "You are Claude Code."}]
            for system in (blocks, f"{billing}\nYou are Claude Code."):
                assert chat_of(system=system).messages[0] == ChatMessage(
                    role="system", parts=["You are Claude Code."]
                )
            assert chat_of(system=billing).messages[0].role == "user"
    with subtests.test("a signature that cannot be ours names nothing"):
        block = {"type": "thinking", "thinking": "Hmm.", "signature": "s" * 400}
        (turn, _) = chat_of(messages=[{"role": "assistant", "content": [block]}, *HI]).messages
        assert (turn.reasoning, turn.answer_id) == ("Hmm.", "")


def test_what_it_samples_by(subtests: pytest.Subtests) -> None:
    with subtests.test("what it samples by"):
        call = call_of(temperature=0.5, top_p=0.25, top_k=5, stop_sequences=["a", "b"])
        expected = SamplingParams(max_tokens=64, temperature=0.5, top_p=0.25, top_k=5, stop=["a", "b"])
        assert call.request.sampling == expected
    with subtests.test("a schema is a constraint"):
        form = {"type": "json_schema", "schema": {"type": "object"}}
        for body in ({"output_config": {"format": form}}, {"output_format": form}):
            assert call_of(**body).request.sampling.constraint == Constraint(json_schema='{"type": "object"}')


def test_thinking_and_variables_are_the_templates_business(subtests: pytest.Subtests) -> None:
    for thinking, variables, shows in [
        (None, {"enable_thinking": False, "thinking": False}, False),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, False),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True}, True),
        ({"type": "adaptive"}, None, True),
    ]:
        with subtests.test(thinking=thinking):
            call = call_of(thinking=thinking)
            assert json.loads(call.request.chat.chat_template_kwargs or "null") == variables
            assert call.shows_thinking is shows
            hard = call_of(thinking=thinking, output_config={"effort": "high"})
            assert json.loads(hard.request.chat.chat_template_kwargs) == {
                **(variables or {}),
                "reasoning_effort": "high",
            }
    with subtests.test("variables may be given by name"):
        given = {"chat_template_kwargs": {"enable_thinking": True, "x": "ä"}}
        expected = {"enable_thinking": True, "thinking": False, "x": "ä"}
        assert json.loads(chat_of(**given).chat_template_kwargs) == expected


def test_tools_and_which_is_called(subtests: pytest.Subtests) -> None:
    with subtests.test("tools that this server cannot serve are left out and named"):
        call = call_of(
            tools=[{"type": "web_search_20250305", "name": "web_search"}, {**WEATHER, "strict": True}]
        )
        assert list(call.request.chat.tools) == [
            Tool(name="weather", description="d", parameters='{"type": "object"}', strict=True)
        ]
        assert call.left_out == ("web_search_20250305",)
    for choice, expected, parallel in [
        ({"type": "auto"}, ToolChoice(mode=ToolChoice.MODE_AUTO), None),
        ({"type": "any"}, ToolChoice(mode=ToolChoice.MODE_REQUIRED), None),
        ({"type": "none"}, ToolChoice(mode=ToolChoice.MODE_NONE), None),
        ({"type": "tool", "name": "weather"}, ToolChoice(name="weather"), None),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            ToolChoice(mode=ToolChoice.MODE_AUTO),
            False,
        ),
    ]:
        with subtests.test(choice=choice):
            chat = chat_of(tools=[WEATHER], tool_choice=choice)
            assert chat.tool_choice == expected
            assert (chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None) is parallel


def test_a_session_is_the_conversation(subtests: pytest.Subtests) -> None:
    for user_id, conversation in [
        ("user_ab_account_cd_session_ef-01", "ef-01"),
        ('{"device_id": "d", "session_id": "ef-02"}', "ef-02"),
        ("somebody", ""),
        ("5", ""),
        ('{"session_id": 5}', ""),
        ('["session_id"]', ""),
        ('{"session_id": "\\ud800"}', ""),  # half of a character
        ("_session_a_session_b", "b"),
        ("_session_" * 300_000 + "!", ""),  # days, were each of them looked at to the end
    ]:
        with subtests.test(user_id=user_id):
            assert call_of(metadata={"user_id": user_id}).request.conversation_id == conversation


USER = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": 5}


def test_what_is_wrong_is_named(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": [CALLED]}]}, "messages[1].content"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [*HI, *found("time")]}, "messages[2].content[0].content[0].tool_name"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                    USER,
                ]
            },
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [CALL],
                    },
                    USER,
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"stop": "a"}, "stop"),
        ({"stop_sequences": ["a", 5]}, "stop_sequences[1]"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": {}}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"metadata": 5}, "metadata"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"stream": 1}, "stream"),
    ]:
        with subtests.test(body=body):
            with pytest.raises(InvalidParameter) as raised:
                call_of(**body)
            assert raised.value.param == param
            assert str(raised.value).startswith(f"{param} ")
