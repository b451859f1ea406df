import json

import pytest

from services.router.text.chats.answers import AnswerCall
from services.router.text.chats.turns import Turn, read_chat
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, Tool, ToolCall


def calling(arguments: str = "{}", name: str = "f") -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=[ToolCall(id="1", name=name, arguments=arguments)])


def test_a_message_is_a_turn() -> None:
    answer = calling('{"a": 1}')
    answer.reasoning = "hm"
    chat = Chat(
        messages=[
            ChatMessage(role="user", parts=["a", "b"], name="Ann"),
            answer,
            ChatMessage(role="tool", content="x", tool_call_id="1", name="f"),
        ],
        tools=[Tool(name="f", parameters='{"type": "object"}'), Tool(name="g", description="d", strict=True)],
        chat_template_kwargs='{"a": 1}',
    )
    read = read_chat(chat)
    assert read.turns == [
        Turn("user", ["a", "b"], name="Ann"),
        Turn("assistant", "", "hm", (AnswerCall("1", "f", '{"a": 1}'),)),
        Turn("tool", "x", tool_call_id="1", name="f"),
    ]
    nothing = {"type": "object", "properties": {}}
    assert read.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "g", "description": "d", "parameters": nothing}},
    ]
    assert read.variables == {"a": 1}

    # Models write that, and who sends their calls back is not to blame.
    [turn] = read_chat(Chat(messages=[calling(json.dumps({"a": "\ud800b", "c": 1.50}))])).turns
    assert turn.calls == (AnswerCall("1", "f", '{"a": "\ufffdb", "c": 1.5}'),)

    [turn] = read_chat(Chat(messages=[calling("")])).turns
    assert turn.calls == (AnswerCall("1", "f", "{}"),)


def test_a_bad_message_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for message, problem in [
        (calling("{"), r"tool_calls\[0\]\.arguments must be a JSON object: "),
        (calling("[]"), r"tool_calls\[0\]\.arguments must be a JSON object$"),
        (calling("5"), r"tool_calls\[0\]\.arguments must"),
        (calling("[" * 9000), r"tool_calls\[0\]\.arguments must"),
        (calling(name=""), r"tool_calls\[0\]\.name must not be empty"),
        (ChatMessage(role="user", reasoning="x"), r"reasoning may only be set for an assistant's turn"),
        (
            ChatMessage(role="tool", tool_calls=[ToolCall(name="f")]),
            r"tool_calls may only be set for an",
        ),
        (ChatMessage(role="user", answer_id="x"), r"answer_id may only be set for an assistant's turn"),
        (ChatMessage(role="user", tool_call_id="x"), r"tool_call_id may only be set for a tool's turn"),
    ]:
        refused = pytest.raises(InvalidRequest, match=rf"^chat\.messages\[1\]\.{problem}")
        with subtests.test(problem), refused:
            read_chat(Chat(messages=[ChatMessage(role="user"), message]))


def test_a_bad_tool_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for tool, problem in [
        (Tool(name=""), "name must not be empty"),
        (Tool(name="f", parameters="["), "parameters must be a JSON object: "),
        (Tool(name="f", parameters="[]"), "parameters must be a JSON object$"),
    ]:
        refused = pytest.raises(InvalidRequest, match=rf"^chat\.tools\[1\]\.{problem}")
        with subtests.test(problem), refused:
            read_chat(Chat(messages=[ChatMessage(role="user")], tools=[Tool(name="a"), tool]))
