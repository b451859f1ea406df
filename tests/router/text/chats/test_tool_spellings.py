"""Tools whose JSON is equal are spelt as they were at first, for each tenant."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.router.text.chats.tool_spellings import ToolSpellings
from services.wire.isthmus.v1.generation_pb2 import Chat, Tool

FIRST = '{"type": "object", "properties": {"id": {"type": "string"}, "content": {"type": "string"}}}'
AGAIN = '{"properties": {"content": {"type": "string"}, "id": {"type": "string"}}, "type": "object"}'


def shown(spellings: ToolSpellings, parameters: str, tenant: str = "", **tool: Any) -> str:
    chat = Chat(tools=[Tool(**{"name": "write", "parameters": parameters} | tool)])
    spellings.restore(tenant, chat)
    return chat.tools[0].parameters


def test_the_first_spelling_stays_and_what_differs_is_as_it_was_sent() -> None:
    spellings = ToolSpellings(1 << 20)
    assert [shown(spellings, text) for text in (FIRST, AGAIN, FIRST, AGAIN)] == [FIRST] * 4

    # Another tenant, name or description, another value, another order in a list, and what is no JSON.
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


keys = st.text("abc", min_size=1, max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def turned(value: Any) -> Any:
    """The same value, each object's keys in the opposite order."""
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
