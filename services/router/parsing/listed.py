"""Models write calls in a list: as JSON, or as a language would write them. Pure.

    [{"name": "f", "arguments": {"a": 1}}, ...]    objects, also without the list's brackets
    [{"f": {"a": 1}}, ...]                         each named by its key
    [f(a=1), ...]                                  Python's calls
    call:f{a: 1}                                   Gemma's, each in markers of its own

Families differ in the markers around it. Where a list has none, it begins the answer and calls a known tool.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from services.router.parsing.arguments import TypedText
from services.router.parsing.calls import Calls, NotACall, call_of, json_arguments, read_object
from services.router.parsing.json_text import text_of, value_of
from services.router.parsing.literals import PYTHON, Literals
from services.router.parsing.reader import Reader, Reading, Unreadable

_NAME = re.compile(r"[\w.\-/]*")
_GEMMA_NAME = re.compile(r"[^\s{<]*")


ReadCall = Callable[[Calls, bool], Reading[None]]  # the second argument says that the tool must be known


def listed(
    calls: Calls,
    opening: str,
    closes: tuple[str, ...] = (),
    leads: tuple[str, ...] = (),
    must_lead: str = "",
    call: ReadCall | None = None,
) -> Reading[None]:
    """`leads` may stand before the list, `must_lead` has to, `closes` may stand behind it. `call` reads each:
    as JSON or as Python's, unless said otherwise."""
    reader, known_only, read_call = calls.reader, not opening, call or _any_call
    yield from _lead(reader, leads, must_lead)
    yield from reader.blank()
    in_list = opening.endswith("[") or bool((yield from reader.either("[")))
    if in_list and (yield from reader.next_is("]")):
        if known_only:
            raise NotACall
        yield from reader.optional("]", *closes)
        return
    yield from read_call(calls, known_only)
    while (yield from _another(reader, in_list)):
        yield from read_call(calls, known_only)
    if in_list:
        yield from reader.expect("]")
    yield from reader.optional(*closes)


def _lead(reader: Reader, leads: tuple[str, ...], must_lead: str) -> Reading[None]:
    if must_lead:
        yield from reader.blank()
        if not (yield from reader.either(must_lead)):
            raise NotACall
    yield from reader.optional(*leads)


def _another(reader: Reader, in_list: bool) -> Reading[bool]:
    """Return whether a call follows the last one, behind a comma or, as some write objects, behind
    nothing."""
    yield from reader.blank()
    if (yield from reader.either(",", ";")):
        return not (in_list and (yield from reader.next_is("]")))
    return (yield from reader.next_is("{"))


def _any_call(calls: Calls, known_only: bool) -> Reading[None]:
    is_object = yield from calls.reader.next_is("{")
    yield from (json_call if is_object else python_call)(calls, known_only)


def json_call(calls: Calls, known_only: bool) -> Reading[None]:
    if not (yield from calls.reader.next_is("{")):
        raise NotACall if known_only else Unreadable
    yield from read_object(calls, ("arguments", "parameters"), known_only)


def keyed_call(calls: Calls, known_only: bool) -> Reading[None]:
    reader = calls.reader
    yield from reader.expect("{")
    name = value_of((yield from reader.json_value()))
    if not isinstance(name, str):
        raise Unreadable
    yield from reader.expect(":")
    yield from json_arguments(calls, name)
    yield from reader.optional("}")


def python_call(calls: Calls, known_only: bool) -> Reading[None]:
    reader = calls.reader
    name = yield from reader.word(_NAME)
    is_call = bool((yield from reader.either("(")))
    if known_only and not (is_call and name in calls.schemas):
        raise NotACall
    if not is_call:
        raise Unreadable
    arguments = yield from PYTHON.members(reader, "=", ")")
    calls.add(call_of(name, text_of(_fitted(arguments, calls.schemas.get(name)))))


def gemma_call(calls: Calls, opening: str, literals: Literals, closes: tuple[str, ...]) -> Reading[None]:
    reader = calls.reader
    yield from reader.expect("call:")
    name = yield from reader.word(_GEMMA_NAME)
    yield from reader.expect("{")
    arguments = yield from literals.members(reader, ":", "}")
    calls.add(call_of(name, text_of(_fitted(arguments, calls.schemas.get(name)))))
    yield from reader.optional(*closes)


def _fitted(arguments: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """A string that its schema allows to be none is what its text says, where that is allowed."""
    typed = TypedText(schema)
    return {
        key: typed.value(key, value) if isinstance(value, str) and not typed.takes_text(key) else value
        for key, value in arguments.items()
    }
