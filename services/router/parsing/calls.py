"""How models write calls of tools: a reading for each way. Pure.

A reading begins behind the marker that opens calls, and ends where content may go on. Each call is added when
it is whole; a closing marker that is missing then changes nothing. Unreadable: what was taken since the last
call is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.router.parsing.arguments import typed_arguments
from services.router.parsing.json_text import arguments_of, is_text, members_of, text_of, value_of
from services.router.parsing.piece import Call, Sink
from services.router.parsing.reader import Reader, Reading, Unreadable

Schemas = Mapping[str, Any]  # of the tools' arguments, by the tool's name


class NotACall(Unreadable):
    """It only looks like one: no call is broken."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Where readings put them."""

    reader: Reader
    sink: Sink
    schemas: Schemas

    def add(self, *calls: Call) -> None:
        for call in calls:
            self.sink.call(call)
        self.reader.mark()

    def attempt(self, reading: Reading[None], opening: str) -> Reading[bool]:
        """Whether all of it was calls; what is none is content. `opening` has been taken for it."""
        self.reader.mark(opening)
        is_whole = False
        try:
            yield from reading
            is_whole = True
        except NotACall:
            self.sink.content(self.reader.taken)
        except Unreadable:
            if self.reader.taken:
                self.sink.broken(self.reader.taken)
        self.reader.forget()
        return is_whole

    def add_texts(self, name: str, texts: Mapping[str, str]) -> None:
        """Raises Unreadable, as all below."""
        self.add(call_of(name, typed_arguments(texts, self.schemas.get(name.strip()))))


def call_of(name: str, arguments: str) -> Call:
    """Raises Unreadable for a name that is none, and for arguments that are no object."""
    name = name.strip()
    if not name or not is_text(name):
        raise Unreadable
    return Call(name, arguments_of(arguments))


def object_call(source: str, arguments: tuple[str, ...] = ("arguments", "parameters")) -> Call:
    """Of an object with a name and arguments, by the first of these names."""
    members = members_of(source)
    name = value_of(members.get("name", '""'))
    if not isinstance(name, str):
        raise Unreadable
    return call_of(name, next((members[key] for key in arguments if key in members), ""))


ReadCalls = Callable[[Calls, str], Reading[None]]  # the second: the marker that opened them


def _line(reader: Reader, end: str) -> Reading[str]:
    """Up to `end`, which is not far: a text that only looks like a call is soon content again."""
    text, marker = yield from reader.until(end, "\n")
    if marker != end:
        raise Unreadable
    return text


def hermes(calls: Calls, opening: str) -> Reading[None]:
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>"""
    source = yield from calls.reader.json()
    calls.add(object_call(source))
    yield from calls.reader.optional("</tool_call>")


def qwen3_coder(calls: Calls, opening: str) -> Reading[None]:
    """<tool_call><function=f><parameter=a>1</parameter></function></tool_call>, blanks between all of them"""
    reader = calls.reader
    if opening == "<tool_call>":
        yield from reader.expect("<function=")
    name = yield from _line(reader, ">")
    texts = {}
    while (yield from reader.expect("<parameter=", "</function>")) == "<parameter=":
        key = yield from _line(reader, ">")
        text, _ = yield from reader.until("</parameter>")
        texts[key] = text.removeprefix("\n").removesuffix("\n")
    calls.add_texts(name, texts)
    yield from reader.optional("</tool_call>")


def glm(calls: Calls, opening: str) -> Reading[None]:
    """<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>, blanks between all of them"""
    reader = calls.reader
    yield from reader.blank()
    name = yield from reader.word()
    texts = {}
    while (yield from reader.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
        key, _ = yield from reader.until("</arg_key>")
        yield from reader.expect("<arg_value>")
        texts[key.strip()], _ = yield from reader.until("</arg_value>")
    calls.add_texts(name, texts)


def minimax(calls: Calls, opening: str) -> Reading[None]:
    """<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>"""
    reader = calls.reader
    while (yield from reader.expect("<invoke name=", "</minimax:tool_call>")) == "<invoke name=":
        name = yield from _line(reader, ">")
        texts = {}
        while (yield from reader.expect("<parameter name=", "</invoke>")) == "<parameter name=":
            key = yield from _line(reader, ">")
            text, _ = yield from reader.until("</parameter>")
            texts[key.strip("\"' ")] = text.removeprefix("\n").removesuffix("\n")
        calls.add_texts(name.strip("\"' "), texts)


def llama3_json(calls: Calls, opening: str) -> Reading[None]:
    """{"name": "f", "parameters": {...}}; {...}, from the answer's beginning or behind <|python_tag|>"""
    while True:
        source = yield from calls.reader.json()
        members = members_of(source)
        if opening != "<|python_tag|>" and value_of(members.get("name", "0")) not in [*calls.schemas]:
            raise NotACall  # an answer in JSON
        calls.add(object_call(source, ("parameters", "arguments")))
        yield from calls.reader.blank()
        if not (yield from calls.reader.either(";")):
            return


def mistral(calls: Calls, opening: str) -> Reading[None]:
    """[TOOL_CALLS]f[ARGS]{...}, once for each call; of older models [TOOL_CALLS][{"name": "f", ...}, ...]"""
    reader = calls.reader
    yield from reader.blank()
    name = yield from reader.word()
    if not name:
        source = yield from reader.json()
        found = value_of(source)
        calls.add(*(object_call(text_of(each)) for each in (found if isinstance(found, list) else [found])))
        return
    if (yield from reader.either("[CALL_ID]")):
        yield from reader.word()
    yield from reader.optional("[ARGS]")
    source = yield from reader.json()
    calls.add(call_of(name, source))


_SEP, _CALL, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def deepseek_v3(calls: Calls, opening: str) -> Reading[None]:
    """Each call: function<sep>f, and its arguments as a code block of JSON."""
    reader = calls.reader
    while (yield from reader.expect(_CALL, _CALLS_END)) == _CALL:
        yield from _line(reader, _SEP)  # the kind of tool
        name, _ = yield from reader.until("\n")
        yield from reader.optional("```json")
        source = yield from reader.json()
        calls.add(call_of(name, source))
        yield from reader.optional("```", _CALL_END)


def deepseek_v31(calls: Calls, opening: str) -> Reading[None]:
    """Each call: f<sep>{...}"""
    reader = calls.reader
    while (yield from reader.expect(_CALL, _CALLS_END)) == _CALL:
        name = yield from _line(reader, _SEP)
        source = yield from reader.json()
        calls.add(call_of(name, source))
        yield from reader.optional(_CALL_END)
