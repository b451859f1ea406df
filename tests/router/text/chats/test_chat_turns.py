import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request.client_request import read_tools
from services.router.text.answer_message import AnswerCall
from services.router.text.chat_turns import ToolSpellings, Turn, read_chat
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, Tool, ToolCall


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

    [turn] = read_chat(Chat(messages=[calling('{"a": "x')])).turns  # The answer ended there.
    assert turn.calls == (AnswerCall("1", "f", '{"a": "x"}'),)


def test_a_bad_message_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for message, problem in [
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


def test_a_hidden_tool_may_be_called_and_is_not_shown() -> None:
    chat = Chat(messages=[ChatMessage(role="user")], tools=[Tool(name="f", hidden=True), Tool(name="g")])
    assert [tool["function"]["name"] for tool in read_chat(chat).tools] == ["g"]
    callable_ = read_tools(GenerateRequest(chat=chat)).callable
    assert callable_ is not None and set(callable_) == {"f", "g"}


def test_a_bad_tool_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for tool, problem in [
        (Tool(name=""), "name must not be empty"),
        (Tool(name="f", parameters="["), "parameters must be a JSON object: "),
        (Tool(name="f", parameters="[]"), "parameters must be a JSON object$"),
    ]:
        refused = pytest.raises(InvalidRequest, match=rf"^chat\.tools\[1\]\.{problem}")
        with subtests.test(problem), refused:
            read_chat(Chat(messages=[ChatMessage(role="user")], tools=[Tool(name="a"), tool]))


FIRST = '{"type": "object", "properties": {"id": {"type": "string"}, "content": {"type": "string"}}}'
AGAIN = '{"properties": {"content": {"type": "string"}, "id": {"type": "string"}}, "type": "object"}'


def shown(spellings: ToolSpellings, parameters: str, tenant: str = "", **tool: Any) -> str:
    chat = Chat(tools=[Tool(**{"name": "write", "parameters": parameters} | tool)])
    spellings.restore(tenant, chat)
    return chat.tools[0].parameters


def test_the_first_spelling_stays_and_what_differs_is_as_it_was_sent() -> None:
    spellings = ToolSpellings(1 << 20)
    assert [shown(spellings, text) for text in (FIRST, AGAIN, FIRST, AGAIN)] == [FIRST] * 4

    # Another tenant, name, description, value or order in a list differs, and so does what is no JSON.
    spellings = ToolSpellings(1 << 20)
    shown(spellings, FIRST)
    shown(spellings, '{"enum": ["a", "b"], "type": "string"}')
    assert shown(spellings, AGAIN, "another") == AGAIN
    assert shown(spellings, AGAIN, name="another") == AGAIN
    assert shown(spellings, AGAIN, description="another") == AGAIN
    for text in (AGAIN.replace("string", "number"), '{"type": "string", "enum": ["b", "a"]}', "{", ""):
        assert shown(spellings, text) == text


def test_what_is_remembered_is_bounded_and_the_least_used_goes_first() -> None:
    spellings = ToolSpellings(64 << 10)
    shown(spellings, FIRST)
    for number in range(1000):
        shown(spellings, json.dumps({"const": str(number)}))
        assert spellings.size_bytes <= 64 << 10
    assert shown(spellings, AGAIN) == AGAIN
    assert shown(spellings, json.dumps("x" * (64 << 10))) and spellings.size_bytes <= 64 << 10

    spellings = ToolSpellings(1 << 20)
    long = '{"description": "%s", "type": "string"}' % ("x" * (256 << 10))
    assert shown(spellings, long) == long and spellings.size_bytes == 0
    chat = Chat(tools=[Tool(name="f", parameters=FIRST)] * 1025)
    spellings.restore("", chat)
    assert spellings.size_bytes == 0


names = st.text("abc", min_size=1, max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


def turned(value: Any) -> Any:
    """Return the same value, each object's keys in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(inner) for key, inner in reversed(value.items())}
    return [turned(inner) for inner in value] if isinstance(value, list) else value


@given(st.lists(values, max_size=6))
def test_the_spelling_shown_is_the_first_of_equal_values(sent: list[Any]) -> None:
    spellings, first = ToolSpellings(1 << 20), {}
    for value in [*sent, *map(turned, sent)]:
        text = json.dumps(value)
        same = json.dumps(value, sort_keys=True)
        assert shown(spellings, text) == first.setdefault(same, text)
