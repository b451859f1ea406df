"""Some models write calls in a list: as JSON, or in the syntax of a language. The module is pure.

    [{"name": "f", "arguments": {"a": 1}}, ...]    These are objects, also without the list's brackets.
    [{"f": {"a": 1}}, ...]                         Each key is a name.
    [f(a=1), ...]                                  These are Python's calls.
    call:f{a: 1}                                   This is Gemma's call; each has its own markers.

Families differ in the markers around the list. A list without markers begins the answer and calls a known
tool.

Models write values in other syntaxes than JSON, which are read as they arrive.

Python    "a", 'it\\'s', 1, True, None, [1, 2], {"a": 1}
Gemma     <|"|>a<|"|>, 1, true, [1, 2], {a: 1}
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.router.parsing.arguments import TypedText, is_text, text_of, value_of
from services.router.parsing.calls import Calls, NotACall, call_of, json_arguments, read_object
from services.router.parsing.reader import Reader, Reading, Unreadable

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}
_FLOAT = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d{1,2})?")  # JSON writes these differently.
_KEY = re.compile(r"[^\s=:,(){}\[\]]*")
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Literals:
    """Strings are between `quotes`; with `escapes` a backslash escapes within them. A number, a constant or,
    with `takes_bare`, a string without quotes matches `word`."""

    quotes: tuple[str, ...]
    escapes: bool
    word: re.Pattern[str]
    takes_bare: bool = False

    def members(self, reader: Reader, sign: str, end: str, depth: int = 0) -> Reading[dict[str, Any]]:
        found: dict[str, Any] = {}
        while not (yield from self._ends(reader, end, bool(found))):
            yield from reader.blank()
            key = yield from self._key(reader)
            yield from reader.expect(sign)
            found[key] = yield from self.value(reader, depth + 1)
        return found

    def value(self, reader: Reader, depth: int = 0) -> Reading[Any]:
        if depth > _MAX_DEPTH:
            raise Unreadable
        yield from reader.blank()
        opening = yield from reader.either("[", "{", "(", *self.quotes)
        match opening:
            case "[":
                return (yield from self._items(reader, "]", depth))
            case "(":
                return (yield from self._items(reader, ")", depth))
            case "{":
                return (yield from self.members(reader, ":", "}", depth))
            case "":
                return self._word_value((yield from reader.word(self.word)).strip())
        return (yield from self._string(reader, opening))

    def _items(self, reader: Reader, end: str, depth: int) -> Reading[list[Any]]:
        found: list[Any] = []
        while not (yield from self._ends(reader, end, bool(found))):
            found.append((yield from self.value(reader, depth + 1)))
        return found

    @staticmethod
    def _ends(reader: Reader, end: str, follows: bool) -> Reading[bool]:
        """Return whether the list ends. A comma is taken, also one right before the end."""
        yield from reader.blank()
        if follows and not (yield from reader.either(",")):
            yield from reader.expect(end)
            return True
        yield from reader.blank()
        return bool((yield from reader.either(end)))

    def _key(self, reader: Reader) -> Reading[str]:
        quote = yield from reader.either(*self.quotes)
        if quote:
            return (yield from self._string(reader, quote))
        key = yield from reader.word(_KEY)
        if not key:
            raise Unreadable
        return key

    def _word_value(self, word: str) -> Any:
        if word in _WORDS:
            return _WORDS[word]
        try:
            return float(word) if _FLOAT.fullmatch(word) else value_of(word)
        except Unreadable:
            if not (self.takes_bare and word):
                raise
            return word

    def _string(self, reader: Reader, quote: str) -> Reading[str]:
        texts: list[str] = []
        while True:
            text, marker = yield from reader.until(quote, *(("\\",) if self.escapes else ()))
            texts.append(text)
            if marker == quote:
                return _unescaped("".join(texts)) if self.escapes else "".join(texts)
            texts += [marker, (yield from reader.one())]


def _unescaped(text: str) -> str:
    """Read escapes as Python does; an invalid one stays. Two halves of a surrogate pair make one."""
    text = _ESCAPE.sub(_character, text)
    return text if is_text(text) else str(json.loads(json.dumps(text)))


def _character(found: re.Match[str]) -> str:
    name = found[1]
    if len(name) > 1:
        code = int(name[1:], 16)
        return chr(code) if code < 0x110000 else found[0]
    return _ESCAPED.get(name, found[0])


# A word is a number or a constant, and with Gemma also a string.
PYTHON = Literals(("'", '"'), escapes=True, word=re.compile(r"[\w.+\-]*"))
GEMMA = Literals(('<|"|>',), escapes=False, word=re.compile(r"[^,\[\]{}<]*"), takes_bare=True)
FUNCTION_GEMMA = Literals(("<escape>",), escapes=False, word=GEMMA.word, takes_bare=True)


_NAME = re.compile(r"[\w.\-/]*")
_GEMMA_NAME = re.compile(r"[^\s{<]*")


ReadCall = Callable[[Calls, bool], Reading[None]]  # The second argument says that the tool must be known.


def listed(
    calls: Calls,
    opening: str,
    closes: tuple[str, ...] = (),
    leads: tuple[str, ...] = (),
    must_lead: str = "",
    call: ReadCall | None = None,
) -> Reading[None]:
    """Read a list of calls. `leads` may come before it, `must_lead` must, and `closes` may follow it. `call`
    reads each call, by default as JSON or as Python's."""
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
    """Convert a string whose schema does not allow strings to the value that its text states."""
    typed = TypedText(schema)
    return {
        key: typed.value(key, value) if isinstance(value, str) and not typed.takes_text(key) else value
        for key, value in arguments.items()
    }
