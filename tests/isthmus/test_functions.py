"""Python functions as tools."""

from typing import Annotated, Any, Literal

import pytest

from isthmus import InvalidRequest, Tool, ToolCall, tool_of
from isthmus.functions import result_of, text_of


def weather(
    city: Annotated[str, "where"],
    unit: Literal["C", "F"] = "C",
    days: list[int] | None = None,
    more: dict[str, Any] | None = None,
) -> str:
    """Return how warm it is.

    In a city.
    """
    return f"{city} 21 {unit} {days} {more}"


def test_hints_become_a_schema():
    tool = tool_of(weather)
    assert (tool.name, tool.description, tool.function) == (
        "weather",
        "Return how warm it is.\n\nIn a city.",
        weather,
    )
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "unit": {"enum": ["C", "F"]},
            "days": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
            "more": {"anyOf": [{"type": "object", "additionalProperties": {}}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert tool_of(tool) is tool


def test_what_json_has_no_type_for_is_refused_by_name():
    def of_bytes(picture: bytes) -> None: ...

    def of_any_number(*cities: str) -> None: ...

    def of_no_hint(city) -> None: ...

    for function, names in ((of_bytes, "picture"), (of_any_number, "cities"), (of_no_hint, "city")):
        with pytest.raises(InvalidRequest, match=rf"tool {function.__name__}: parameter {names}"):
            tool_of(function)
    with pytest.raises(InvalidRequest, match="a Tool or a function"):
        tool_of("weather")


def test_a_call_is_made_with_its_arguments(subtests):
    with subtests.test("a call is made with its arguments"):
        call_it, said = result_of(
            [tool_of(weather)], ToolCall("1", "weather", '{"city": "Corinth", "days": [1]}')
        )
        assert call_it() == "Corinth 21 C [1] None" and said == ""
    for name, arguments, says in [
        ("wether", "{}", "no tool wether"),
        ("weather", "{}", "city"),
        ("weather", '{"town": 1}', "city"),
    ]:
        with subtests.test(name=name):
            call_it, said = result_of([tool_of(weather)], ToolCall("1", name, arguments))
            assert call_it is None and said.startswith("error: ") and says in said
    with (
        subtests.test("a tool without a function is not called"),
        pytest.raises(InvalidRequest, match="tool_result"),
    ):
        result_of([Tool("weather")], ToolCall("1", "weather"))
    with subtests.test("results are text or json"):
        assert text_of("21") == "21" and text_of({"ä": [1]}) == '{"ä": [1]}'
        with pytest.raises(TypeError):
            text_of(object())
