"""Turns in orders that templates refuse, or leave out of what they write, reach every template."""

from collections.abc import Callable, Sequence

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.chats.test_template_turns import raises
from services.router.text.answer_message import AnswerCall
from services.router.text.chat_turns import Turn
from services.router.text.template_turns import TemplateTurns
from services.router.text.turn_order import SystemPlace, TurnOrder, arrange

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
EACH += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('') }}"
)
SYSTEM_FIRST += "{% endif %}{% endfor %}"
ALTERNATES = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant'"
)
ALTERNATES += (
    " and not m.tool_calls) %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('') }}"
)
ALTERNATES += "{% endif %}{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
FIRST_SYSTEM_ALONE = EACH.replace("messages %}", "messages if m.role != 'system' or m == messages[0] %}")
LAST_SYSTEM_ALONE = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endfor %}{{ ns.s }}" + EACH.replace("messages %}", "messages if m.role != 'system' %}")
)
NO_SYSTEM = EACH.replace("<{{", "{% if m.role == 'system' %}{{ raise_exception('') }}{% endif %}<{{")
SILENT = EACH.replace("messages %}", "messages if m.role != 'system' %}")
IN_LAST_USER = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}"
    + EACH.replace(
        "m.content }}", "(s + '\\n\\n' if s and loop.last and m.role == 'user' else '') + m.content }}"
    )
)
NO_RESULTS = EACH.replace("messages %}", "messages if m.role != 'tool' %}")
SINGLE_CALLS = EACH.replace(
    "{% for c", "{% if m.tool_calls | length > 1 %}{{ raise_exception('') }}{% endif %}{% for c"
)
TEMPLATES = {
    "any": EACH,
    "system first": SYSTEM_FIRST + EACH,
    "first system alone": FIRST_SYSTEM_ALONE,
    "last system alone": LAST_SYSTEM_ALONE,
    "no system": NO_SYSTEM,
    "silent": SILENT,
    "alternates": ALTERNATES + EACH,
    "strict": SYSTEM_FIRST + ALTERNATES + EACH,
    "gemma": ALTERNATES + NO_SYSTEM,
    "in the last user": SYSTEM_FIRST + ALTERNATES + IN_LAST_USER,
    "no results": NO_RESULTS,
    "single calls": SINGLE_CALLS,
    "strict, single calls": SYSTEM_FIRST + ALTERNATES + SINGLE_CALLS,
}
CALL = AnswerCall("abcdefghi", "f", "{}")
SECOND = AnswerCall("bcdefghij", "g", "{}")


def of(template: str) -> tuple[TemplateTurns, Callable[[Sequence[Turn]], str]]:
    environment = jinja2.Environment()
    environment.globals["raise_exception"] = raises
    compiled = environment.from_string(template)
    turns = TemplateTurns(
        lambda messages, tools: compiled.render(messages=messages, tools=tools),
        names_developers="developer" in template,
    )

    def written(chat: Sequence[Turn]) -> str:
        return compiled.render(messages=[turns.of(each.turn) for each in arrange(chat, turns.order)])

    return turns, written


KNOWN = {name: of(template) for name, template in TEMPLATES.items()}
SYSTEM, QUESTION, ANSWER = Turn("system", "s"), Turn("user", "u"), Turn("assistant", "a")
CALLS, RESULT = Turn("assistant", calls=(CALL,)), Turn("tool", "t", tool_call_id=CALL.id)
TWO_CALLS, SECOND_RESULT = (
    Turn("assistant", "x", calls=(CALL, SECOND)),
    Turn("tool", "q", tool_call_id=SECOND.id),
)
LATE, MORE = Turn("system", "late"), Turn("user", "more")


def test_turns_reach_a_template_where_they_stand(subtests: pytest.Subtests) -> None:
    for name, chat, expected in [
        ("any", [SYSTEM, LATE, QUESTION, MORE, LATE], "<system>s<system>late<user>u<user>more<system>late"),
        ("any", [Turn("developer", "d"), QUESTION], "<system>d<user>u"),
        ("system first", [SYSTEM, LATE, QUESTION, MORE], "<system>s\n\nlate<user>u<user>more"),
        ("system first", [SYSTEM, QUESTION, ANSWER, LATE], "<system>s<user>u<assistant>a<user>late"),
        ("first system alone", [SYSTEM, LATE, QUESTION], "<system>s\n\nlate<user>u"),
        ("first system alone", [SYSTEM, QUESTION, LATE], "<system>s<user>u<user>late"),
        ("last system alone", [SYSTEM, LATE, QUESTION, LATE], "s\n\nlate<user>u<user>late"),
        ("no system", [SYSTEM, LATE, QUESTION], "<user>s\n\nlate\n\nu"),
        ("no system", [SYSTEM, ANSWER, QUESTION], "<user>s<assistant>a<user>u"),
        ("silent", [SYSTEM, QUESTION, ANSWER, LATE], "<user>s\n\nu<assistant>a<user>late"),
        ("alternates", [QUESTION, MORE, ANSWER, ANSWER, MORE], "<user>u\n\nmore<assistant>a\n\na<user>more"),
        ("strict", [SYSTEM, LATE, QUESTION, LATE, ANSWER], "<system>s\n\nlate<user>u\n\nlate<assistant>a"),
        ("strict", [QUESTION, CALLS, RESULT, MORE], "<user>u<assistant>f{}<tool>t<assistant>Done.<user>more"),
        ("strict", [QUESTION, CALLS, RESULT, ANSWER], "<user>u<assistant>f{}<tool>t<assistant>a"),
        ("gemma", [SYSTEM, QUESTION, LATE, ANSWER], "<user>s\n\nu\n\nlate<assistant>a"),
        ("in the last user", [SYSTEM, QUESTION, ANSWER, MORE], "<user>u<assistant>a<user>s\n\nmore"),
        ("in the last user", [SYSTEM, QUESTION, CALLS, RESULT], "<user>s\n\nu<assistant>f{}<tool>t"),
        ("no results", [QUESTION, CALLS, RESULT], "<user>u<assistant>f{}<user>t"),
        ("any", [TWO_CALLS, RESULT, SECOND_RESULT], "<assistant>xf{}g{}<tool>t<tool>q"),
        ("single calls", [QUESTION, CALLS, RESULT], "<user>u<assistant>f{}<tool>t"),
        ("single calls", [TWO_CALLS, RESULT, SECOND_RESULT], "<assistant>xf{}<tool>t<assistant>g{}<tool>q"),
        ("single calls", [TWO_CALLS, SECOND_RESULT, RESULT], "<assistant>xf{}<tool>t<assistant>g{}<tool>q"),
        ("single calls", [TWO_CALLS, RESULT, MORE], "<assistant>xf{}<tool>t<assistant>g{}<user>more"),
        (
            "single calls",
            [TWO_CALLS, Turn("tool", "1"), Turn("tool", "2"), Turn("tool", "3")],
            "<assistant>xf{}<tool>1<assistant>g{}<tool>2<tool>3",
        ),
        (
            "strict, single calls",
            [SYSTEM, QUESTION, TWO_CALLS, RESULT, SECOND_RESULT, ANSWER],
            "<system>s<user>u<assistant>xf{}<tool>t<assistant>g{}<tool>q<assistant>a",
        ),
    ]:
        with subtests.test(expected):
            _, written = KNOWN[name]
            assert written(chat) == expected


def test_parts_stay_parts_where_turns_are_joined_and_developers_are_told_from_systems() -> None:
    [placed] = arrange(
        [Turn("user", ["a", "b"]), Turn("user", "c"), Turn("user", ["d", "e"])], TurnOrder(users=False)
    )
    assert placed.turn.content == ["a", "b\n\nc\n\nd", "e"]
    assert placed.origins == (0, 1, 2)

    first = "{% for m in messages if m.role != 'developer' or m == messages[0] %}"
    turns, written = of(EACH.replace("{% for m in messages %}", first))
    assert turns.order.developers and not turns.order.late
    chat = [Turn("developer", "d"), Turn("system", "s"), QUESTION, Turn("developer", "e")]
    assert written(chat) == "<developer>d\n\ns<user>u<user>e"


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "loop"])


@given(
    name=st.sampled_from(sorted(TEMPLATES.keys() - {"in the last user"})), roles=st.lists(ROLES, max_size=8)
)
def test_a_chat_that_grows_goes_on_as_it_began(name: str, roles: list[str]) -> None:
    turns, _ = KNOWN[name]
    chat = [turn for i, role in enumerate(roles) for turn in turns_of(role, str(i))]
    before: list[Turn] = []
    for length in range(1, len(chat) + 1):
        now = [each.turn for each in arrange(chat[:length], turns.order)]
        if before:
            *whole, last = before
            grown = now[len(whole)]
            assert now[: len(whole)] == whole
            assert grown.role == last.role and str(grown.content).startswith(str(last.content))
        before = now


def turns_of(role: str, text: str) -> list[Turn]:
    if role == "loop":
        return [CALLS, Turn("tool", f"t{text}", tool_call_id=CALL.id)]
    return [Turn(role, f"{role}{text}")]


def test_nothing_is_lost_in_any_order() -> None:
    for name, (turns, written) in KNOWN.items():
        for chat in ("system user assistant user", "user system", "system developer user user loop"):
            said = [turn for i, role in enumerate(chat.split()) for turn in turns_of(role, str(i))]
            text = written(said)
            assert all(str(turn.content) in text for turn in said), (name, chat, text)
        assert turns.order.system is SystemPlace.OWN or name in (
            "no system",
            "silent",
            "gemma",
            "in the last user",
        )
