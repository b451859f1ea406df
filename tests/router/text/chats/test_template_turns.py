"""Turns reach templates that want them otherwise."""

import json
from dataclasses import replace
from typing import Any

import jinja2
import pytest

from router.templates.formats import FORMATS
from services.router.text.answer_message import AnswerCall
from services.router.text.chat_turns import ChatTurns, Turn
from services.router.text.template_turns import TemplateTurns
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest


def raises(message: str) -> None:
    raise ValueError(message)


def turns_of(template: str) -> TemplateTurns:
    environment = jinja2.Environment(undefined=jinja2.Undefined)
    environment.globals |= {"raise_exception": raises, "bos_token": "", "eos_token": ""}
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **how)  # as transformers has it
    compiled = environment.from_string(template)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        return compiled.render(messages=messages, tools=tools)

    return TemplateTurns(render)


CALL = AnswerCall("call_0123456789abcdef01234567", "f", '{"a": "b"}')
HEAD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
EACH = "{% for c in m.tool_calls %}{{ c.function.name }}"


def of(template: str, turn: Turn) -> dict[str, Any]:
    return turns_of(template).of(turn)


CALLS = EACH + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"


def test_content_beside_calls_is_null_where_an_empty_text_is_refused() -> None:
    refusing = "{% for m in messages %}{% if m.content == '' %}{{ raise_exception('') }}{% endif %}" + CALLS
    for template, content in ((HEAD + CALLS, ""), (refusing, None)):
        assert of(template, Turn("assistant", calls=(CALL,)))["content"] == content
        assert of(template, Turn("assistant", "x", calls=(CALL,)))["content"] == "x"


def test_a_tool_has_what_its_template_cannot_do_without(subtests: pytest.Subtests) -> None:
    """OpenAI's schema lets a description be left out, JSON schema the properties."""
    for needs, filled in [
        ("", {}),
        ("{{ t.function.description + '' }}", {"description": ""}),
        ("{% for p in t.function.parameters.properties.items() %}{% endfor %}", {"properties": {}}),
        (
            "{{ t.function.description + '' }}{{ t.function.parameters.properties | tojson }}",
            {"description": "", "properties": {}},
        ),
    ]:
        with subtests.test(needs):
            turns = turns_of(
                "{% for t in tools %}{{ t.function.name }}" + needs + "{% endfor %}{{ messages[0].content }}"
            )
            function = turns.tool(
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            )["function"]
            assert turns.reads_tools
            assert {**function.pop("parameters"), **function} == {"name": "f", "type": "object", **filled}

    turns = turns_of(
        "{% for t in tools %}{{ t.function.name }}{% for p in t.function.parameters.properties.items() %}"
        "{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    parameters = {"type": "object", "properties": {"x": {}}, "required": ["x"]}
    tool = turns.tool({"type": "function", "function": {"name": "f", "parameters": parameters}})
    assert [*tool["function"]["parameters"].items()] == [*parameters.items()]
    tool = turns.tool({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})
    assert [*tool["function"]["parameters"].items()] == [("type", "object"), ("properties", {})]


def test_arguments_are_what_the_template_takes(subtests: pytest.Subtests) -> None:
    for written, as_text in [
        ("{{ c.function.arguments | tojson }}", False),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", False),
        ("{{ '' + c.function.arguments }}", True),
        ("{{ c.function.arguments }}", True),  # an object would be written as Python has it
        (
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}",
            False,
        ),
    ]:
        with subtests.test(written):
            template = HEAD + EACH + written + "{% endfor %}{% endfor %}"
            message = of(template, Turn("assistant", calls=(CALL,)))
            assert message["tool_calls"][0]["function"]["arguments"] == (
                '{"a": "b"}' if as_text else {"a": "b"}
            )

    # mistral-common's templates take arguments as an object and write HTML around them.
    escaping = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}&#34;"
    escaping += "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
    message = of(HEAD + EACH + escaping, Turn("assistant", calls=(CALL,)))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "b"}'


def test_ids_are_short_where_they_must_be() -> None:
    checks = (
        "{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('') }}{% endif %}{% endfor %}"
    )
    turns = turns_of(HEAD + checks + CALLS)
    message, result = turns.of(Turn("assistant", calls=(CALL,))), turns.of(Turn("tool", tool_call_id=CALL.id))
    assert message["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9 and result["tool_call_id"].isalnum()
    assert turns.of(Turn("tool", tool_call_id="abcdefghi"))["tool_call_id"] == "abcdefghi"
    assert of(HEAD + CALLS, Turn("assistant", calls=(CALL,)))["tool_calls"][0]["id"] == CALL.id

    checks = (
        "{% for c in m.tool_calls %}{% if c.id|length < 9 %}{{ raise_exception('') }}{% endif %}"
        "{{ c.id[-9:] }}{% endfor %}"
    )
    turns = turns_of(HEAD + checks + CALLS)
    short = turns.of(Turn("assistant", calls=(replace(CALL, id="1"),)))["tool_calls"][0]["id"]
    assert len(short) == 9 and turns.of(Turn("tool", tool_call_id="1"))["tool_call_id"] == short
    assert turns.of(Turn("assistant", calls=(CALL,)))["tool_calls"][0]["id"] == CALL.id
    assert turns.shows_ids and not turns_of(HEAD + CALLS).shows_ids


def turns_whose_ids_are_text() -> TemplateTurns:
    each = "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    return turns_of(
        HEAD + each + "{{ m.name }}{{ m.tool_call_id }}{% endfor %}"
    )  # a result has its tool's name


# Each row has calls as (name, id), results as (name, id) behind them, and what becomes of the ids.
NUMBERED = (
    ([("f", "functions.f:1")], [("", "functions.f:1")], ["functions.f:1"], ["functions.f:1"]),
    ([("f", "call_abc"), ("f", "x")], [("", "x"), ("", "")], ["functions.f:2", "functions.f:3"], [1, 0]),
    ([("f", ""), ("g", "")], [("", ""), ("", "")], ["functions.f:4", "functions.g:5"], [0, 1]),
    ([("f", ""), ("g", "")], [("g", ""), ("f", "")], ["functions.f:6", "functions.g:7"], [1, 0]),
    ([("f", "functions.f:9"), ("f", ""), ("f", "")], [("h", "")], [9, 10, 11], [""]),
)


def test_ids_that_are_the_calls_text_number_the_calls_of_a_chat() -> None:
    turns = turns_whose_ids_are_text()
    calls = [
        replace(CALL, id=id_, name=name) for id_, name in (("a", "f"), ("functions.g:1", "g"), ("c", "f"))
    ]
    named = turns.with_own_ids(
        [
            Turn("assistant", calls=tuple(calls[:2])),
            Turn("tool", tool_call_id="a"),
            Turn("tool", tool_call_id="functions.g:1"),
            Turn("assistant", calls=tuple(calls[2:])),
            Turn("tool", tool_call_id="c"),
        ]
    )
    ids = ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert [call.id for turn in named for call in turn.calls] == ids
    assert [turn.tool_call_id for turn in named if turn.role == "tool"] == ids
    assert turns_of(HEAD + CALLS).with_own_ids(named) == named

    chat, called, answered = list[Turn](), list[str](), list[str]()
    for calls, results, ids, expected in NUMBERED:
        chat.append(Turn("assistant", calls=tuple(AnswerCall(id_, name, "{}") for name, id_ in calls)))
        chat += [Turn("tool", "x", tool_call_id=id_, name=name) for name, id_ in results]
        own = [f"functions.f:{each}" if isinstance(each, int) else each for each in ids]
        called += own
        answered += [own[each] if isinstance(each, int) else each for each in expected]
    named = turns_whose_ids_are_text().with_own_ids(chat)
    assert [call.id for turn in named for call in turn.calls] == called
    assert [turn.tool_call_id for turn in named if turn.role == "tool"] == answered
    later = [Turn("assistant", calls=(AnswerCall(id_, "f", "{}"),)) for id_ in ("a", "functions.f:0")]
    own = [call.id for turn in turns_whose_ids_are_text().with_own_ids(later) for call in turn.calls]
    assert own == ["functions.f:1", "functions.f:0"]


def test_thinking_stands_where_it_is_read(subtests: pytest.Subtests) -> None:
    for shown, keys in [
        ("", {"reasoning_content", "reasoning", "thinking"}),  # none is shown: all are harmless
        ("{{ m.reasoning }}", {"reasoning_content", "reasoning", "thinking"}),
        ("{{ m.reasoning_content }}{{ m.thinking }}", {"reasoning_content"}),  # it would be there twice
    ]:
        with subtests.test(shown):
            message = of(HEAD + shown + "{% endfor %}", Turn("assistant", "x", "hm"))
            assert {key for key, value in message.items() if value == "hm"} == keys

    turns = turns_of(FORMATS["gpt_oss"].template)
    message = turns.of(Turn("assistant", "I look.", "hm", (CALL,)))
    assert (message["content"], message["thinking"]) == ("", "hm\n\nI look.")
    assert turns.of(Turn("assistant", "I look.", "", (CALL,)))["content"] == "I look."
    assert turns.of(Turn("assistant", "It is.", "hm"))["content"] == "It is."

    part = "{% for p in m.content %}{{ p.text or '[THINK]' + p.thinking + '[/THINK]' }}{% endfor %}"
    turns = turns_of(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        + part
        + "{% endif %}{% endfor %}"
    )
    thought, said = turns.of(Turn("assistant", "x", "hm"))["content"]
    assert (thought, said) == ({"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"})
    assert turns.keeps_past_reasoning
    written_out = turns_of(HEAD + "{% endfor %}")  # which shows a list as Python has it
    assert written_out.of(Turn("assistant", "x", "hm"))["content"] == "x"


def test_what_a_template_does_is_known() -> None:
    for name, format_ in FORMATS.items():
        turns = turns_of(format_.template)
        assert turns.writes_calls and turns.reads_tools, name
        assert not turns.keeps_past_reasoning
    plain = turns_of(HEAD + "{% endfor %}")
    assert not plain.writes_calls and not plain.reads_tools
    assert turns_of(HEAD + "{{ m.thinking }}{% endfor %}").keeps_past_reasoning


def test_a_tools_parts_reach_a_template_that_refuses_results_without_calls() -> None:
    each = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    parts = "{% if m.role == 'tool' and m.content is not string %}" + each
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
        "{{ raise_exception('') }}{% endif %}" + parts + "{% else %}{{ m.content }}{% endif %}" + CALLS
    )
    content = of(template, Turn("tool", ["a", "b"], tool_call_id="1"))["content"]
    assert content == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_tools_and_calls_are_refused_where_the_template_shows_none(character_tokenizer: Tokenizer) -> None:
    question, tool = Turn("user", "Hi"), {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(InvalidRequest, match=r"^chat\.tools cannot be used"):
        character_tokenizer.arranged(ChatTurns([question], [tool]))
    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[1\]\.tool_calls cannot be used"):
        character_tokenizer.arranged(ChatTurns([question, Turn("assistant", calls=(CALL,))]))
    assert not character_tokenizer.arranged(ChatTurns([question], [tool], may_call=False)).tools
