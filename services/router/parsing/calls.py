"""Models write tool calls in several formats; each has a reading here. The module is pure.

A reading begins after the marker that opens calls, and ends where content may continue. A call is reported
when it is complete, and long arguments as they arrive; a missing closing marker then changes nothing. Where a
reading raises Unreadable, what it took and did not report is not a call.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from services.router.parsing.arguments import TypedText, arguments_of, is_text, members_of, text_of, value_of
from services.router.parsing.piece import CallPiece, ParsedCall, Sink, Unlined
from services.router.parsing.reader import Reader, Reading, Unreadable

_Result = TypeVar("_Result")

Schemas = Mapping[str, Any]  # The values are the schemas of tools' arguments, by the tool's name.

# Arguments up to this many characters are reported with the complete call: a text that breaks off before, or
# is not a call, becomes content. Longer ones, such as a file's text, are reported as they arrive.
_WHOLE_CHARS = 256
_OBJECT = re.compile(r'\{[ \t\r\n]*["}]')
_NAMES = ("name", "tool_name")


class NotACall(Unreadable):
    """The text only looked like a call, so no call is broken."""


@dataclass(frozen=True, slots=True)
class Calls:
    reader: Reader
    sink: Sink
    schemas: Schemas

    def add(self, *calls: ParsedCall) -> None:
        for call in calls:
            self.report(CallPiece(call.name, call.arguments, ends=True, id=call.id))

    def report(self, piece: CallPiece) -> None:
        self.sink.call(piece)
        self.reader.mark()

    def attempt(self, reading: Reading[None], opening: str) -> Reading[bool]:
        """Return whether all of the text was calls; the rest becomes content. `opening` is the marker that
        was taken."""
        self.reader.mark(opening)
        is_whole = False
        try:
            yield from reading
            is_whole = True
        except NotACall:
            self.sink.content(self.reader.taken)
        except Unreadable:
            if self.reader.taken or self.sink.has_open_call:
                self.sink.broken(self.reader.taken)
        self.reader.forget()
        return is_whole


class Arguments:
    """One call's arguments arrive in pieces; the name is checked first. This class and all functions below
    raise Unreadable."""

    def __init__(self, calls: Calls, name: str, id_: str = "") -> None:
        self._calls = calls
        self.name = _checked(name)
        self._id = id_
        self._texts: list[str] = []
        self._num_chars = 0
        self._begun = False

    def add(self, text: str) -> None:
        was_short = self._num_chars <= _WHOLE_CHARS
        self._texts.append(text)
        self._num_chars += len(text)
        if self._begun:
            self._calls.report(CallPiece(arguments=text))
        elif was_short and self._num_chars > _WHOLE_CHARS:
            self._begin("".join(self._texts))

    def _begin(self, text: str) -> None:
        if _OBJECT.match(text, 0, _WHOLE_CHARS):
            self._begun = True
            self._calls.report(CallPiece(self.name, text, id=self._id))

    def end(self) -> None:
        arguments = arguments_of("".join(self._texts))
        if self._begun:
            self._calls.report(CallPiece(ends=True))
        else:
            self._calls.add(ParsedCall(self.name, arguments, self._id))


class TextArguments:
    def __init__(self, calls: Calls, name: str) -> None:
        name = name.strip()
        self._arguments = Arguments(calls, name)
        self._typed = TypedText(calls.schemas.get(name))
        self._given = set[str]()

    def misses(self, key: str) -> bool:
        return bool(key) and self._typed.may_have(key) and key not in self._given

    def read(
        self, key: str, value: Callable[[Callable[[str], object]], Reading[_Result]], is_text: bool = False
    ) -> Reading[_Result]:
        """Return the result of `value`, which reads the argument's text into a sink. `is_text` says that the
        model marked it as text, which holds where the schema allows text."""
        self._begin(key)
        if self._typed.is_string(key) or (is_text and self._typed.takes_text(key)):
            self._arguments.add('"')
            result = yield from value(lambda text: self._arguments.add(text_of(text)[1:-1]))
            self._arguments.add('"')
        else:
            texts: list[str] = []
            result = yield from value(texts.append)
            self._arguments.add(text_of(self._typed.value(key, "".join(texts))))
        return result

    def add(self, key: str, value: Any) -> None:
        self._begin(key)
        self._arguments.add(text_of(value))

    def _begin(self, key: str) -> None:
        if key in self._given:
            raise Unreadable
        self._arguments.add(f"{', ' if self._given else '{'}{text_of(key)}: ")
        self._given.add(key)

    def end(self) -> None:
        self._arguments.add("}" if self._given else "{}")
        self._arguments.end()


def call_of(name: str, arguments: str) -> ParsedCall:
    return ParsedCall(_checked(name), arguments_of(arguments))


def _checked(name: str) -> str:
    name = name.strip()
    if not name or not is_text(name):
        raise Unreadable
    return name


def object_call(source: str, arguments: tuple[str, ...] = ("arguments", "parameters")) -> ParsedCall:
    return _call_of_members(members_of(source), arguments)


def _call_of_members(members: Mapping[str, str], arguments: tuple[str, ...]) -> ParsedCall:
    return call_of(_name_in(members), next((members[key] for key in arguments if key in members), ""))


def _name_in(members: Mapping[str, str]) -> str:
    name = _value_of_name(members)
    if not isinstance(name, str):
        raise Unreadable
    return name


def _value_of_name(members: Mapping[str, str]) -> Any:
    return value_of(next((members[key] for key in _NAMES if key in members), '""'))


ReadCalls = Callable[[Calls, str], Reading[None]]  # The second argument is the marker that opened the calls.


_line = Reader.line


def hermes(calls: Calls, opening: str) -> Reading[None]:
    """Read <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""
    yield from _objects(calls, ("arguments", "parameters"))
    yield from calls.reader.optional("</tool_call>")


def _objects(calls: Calls, arguments: tuple[str, ...], known_only: bool = False) -> Reading[None]:
    yield from read_object(calls, arguments, known_only)
    while (yield from _goes_on(calls.reader)):
        yield from read_object(calls, arguments, known_only)


def _goes_on(reader: Reader) -> Reading[bool]:
    yield from reader.blank()
    between = yield from reader.either(",", ";")
    more = yield from reader.next_is("{")
    if between and not more:
        raise NotACall  # A sentence continues like this.
    return more


def read_object(calls: Calls, arguments: tuple[str, ...], known_only: bool = False) -> Reading[None]:
    """Read a call. With `known_only`, raises NotACall where it names no tool or an unknown one."""
    reader, members, streamed = calls.reader, dict[str, str](), None
    yield from reader.expect("{")
    more = not (yield from reader.next_is("}"))
    while more:
        name = value_of((yield from reader.json_value()))
        if not isinstance(name, str):
            raise Unreadable
        yield from reader.expect(":")
        is_named = not members.keys().isdisjoint(_NAMES)
        if name in arguments and is_named and streamed is None and (yield from reader.next_is("{")):
            streamed = Arguments(calls, _name_in(members))
            yield from reader.json(streamed.add)
        else:
            members[name] = yield from reader.json_value()
            if not members[name]:
                raise Unreadable
        if known_only and name in _NAMES:
            _check_known(members, calls.schemas)
        yield from reader.blank()
        more = bool((yield from reader.either(",")))
    yield from reader.expect("}")
    if known_only:
        _check_known(members, calls.schemas)
    if streamed is not None:
        streamed.end()
    else:
        calls.add(_call_of_members(members, arguments))


def _check_known(members: Mapping[str, str], schemas: Schemas) -> None:
    if _value_of_name(members) not in [*schemas]:
        raise NotACall  # This is an answer in JSON.


def json_arguments(calls: Calls, name: str, id_: str = "") -> Reading[None]:
    arguments = Arguments(calls, name, id_)
    yield from calls.reader.json(arguments.add)
    arguments.end()


@dataclass(frozen=True, slots=True)
class _Tags:
    """Arguments are between tags: each `begins`, has something `between` its name and its value, and `ends`.
    `closes` are the tags that close the call, from the inside out; `opens` are those of the next call."""

    begins: str
    between: tuple[str, ...]
    ends: str
    closes: tuple[str, ...]
    opens: tuple[str, ...]
    on_lines: bool = True  # A value has its own lines.


_QWEN = _Tags(
    "<parameter=", (">",), "</parameter>", ("</function>", "</tool_call>"), ("<tool_call>", "<function=")
)
_GLM = _Tags(
    "<arg_key>",
    ("</arg_key>", "<arg_value>"),
    "</arg_value>",
    ("</tool_call>",),
    ("<tool_call>",),
    on_lines=False,
)
_MINIMAX = _Tags(
    "<parameter name=", (">",), "</parameter>", ("</invoke>", "</minimax:tool_call>"), ("<invoke name=",)
)
_KEY = re.compile(r"[^\n<>]*")


@dataclass(slots=True)
class _Tagged:
    """This reads a call with its arguments between tags. Models sometimes leave out closing tags. A value
    without one ends

    - where a line begins with the tag of an argument that the tool may have and that was not written yet,
      unless that argument follows the next end of a value: then the value only mentions the tag;
    - where tags close the call and nothing follows;
    - where a line begins with tags that close the call, and a call follows; none does where a value ends
      before any other tag.

    All other text between two tags is the value. An argument that is given twice makes a call unreadable.
    """

    reader: Reader
    tags: _Tags
    arguments: TextArguments
    follows: str | None = None  # It comes after the next value's end; None is not looked up.

    def read(self) -> Reading[None]:
        """Leave the tag that ends the call, or opens another, in the reader, or raise Unreadable."""
        tags = self.tags
        found = yield from self.reader.expect(tags.begins, *tags.closes, *tags.opens)
        while found == tags.begins:
            key, _ = yield from self._key()
            if not key:
                raise Unreadable
            while key:
                key = yield from self.arguments.read(key, self._value)
            found = yield from self.reader.expect(tags.begins, *tags.closes, *tags.opens)
        self.reader.put_back(found)
        self.arguments.end()

    def _value(self, sink: Callable[[str], object]) -> Reading[str]:
        """Return the name of the argument that begins before this one's end, or "" for none."""
        tags, text = self.tags, Unlined(sink, led=self.tags.on_lines)
        while True:
            marker = yield from self.reader.upto((tags.ends, tags.begins, *tags.closes), text)
            if marker is None:
                raise Unreadable
            taken = ""
            if marker == tags.begins:
                key, taken = yield from self._key()
                if text.begins_line and self.arguments.misses(key) and key != (yield from self._behind_end()):
                    return key
            elif marker == tags.ends:
                self.follows = None
                sink("" if tags.on_lines else text.held)
                return ""
            else:
                self.follows = None
                if (yield from self._ends_call(marker, text.begins_line)):
                    return ""
            text(marker + taken)

    def _key(self) -> Reading[tuple[str, str]]:
        reader, between = self.reader, self.tags.between
        texts = [(yield from reader.blank()), (yield from reader.word(_KEY))]
        while between:
            texts.append((yield from reader.blank()))
            found = yield from reader.either(*between)
            if not found:
                return "", "".join(texts)
            texts.append(found)
            between = between[between.index(found) + 1 :]
        return texts[1].strip("\"' "), "".join(texts)

    def _behind_end(self) -> Reading[str]:
        """Return the name of the argument after the next end of a value, or "", without taking text."""
        if self.follows is None:
            reader, tags, texts = self.reader, self.tags, list[str]()
            end = yield from reader.upto((tags.ends, *tags.closes), texts.append)
            texts.append(end or "")
            self.follows = ""
            if end == tags.ends:
                texts += [(yield from reader.blank()), (yield from reader.either(tags.begins))]
                if texts[-1]:
                    self.follows, taken = yield from self._key()
                    texts.append(taken)
            reader.put_back("".join(texts))
        return self.follows

    def _ends_call(self, closing: str, begins_line: bool) -> Reading[bool]:
        """Return whether the call ends with the tag, which is then put back. No text after it is taken."""
        reader, tags, texts = self.reader, self.tags, list[str]()
        for closes in tags.closes[tags.closes.index(closing) + 1 :]:
            texts += [(yield from reader.blank()), (yield from reader.either(closes))]
        texts += [(yield from reader.blank()), (yield from reader.either(*tags.opens))]
        if texts[-1] and begins_line:
            found = yield from reader.upto((tags.ends, tags.begins, *tags.closes), texts.append)
            texts.append(found or "")
            is_end = found != tags.ends
        else:
            is_end = not texts[-1] and not reader.has_more
        reader.put_back((closing if is_end else "") + "".join(texts))
        return is_end


def qwen3_coder(calls: Calls, opening: str) -> Reading[None]:
    """Read <tool_call><function=f><parameter=a>1</parameter></function></tool_call>, with blanks
    anywhere between."""
    reader = calls.reader
    if opening == "<tool_call>":
        yield from reader.expect("<function=")
    arguments = TextArguments(calls, (yield from _line(reader, ">")))
    yield from _Tagged(reader, _QWEN, arguments).read()
    yield from reader.optional(*_QWEN.closes)


def glm(calls: Calls, opening: str) -> Reading[None]:
    """Read <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>, with blanks between."""
    reader = calls.reader
    yield from reader.blank()
    arguments = TextArguments(calls, (yield from reader.word()))
    yield from _Tagged(reader, _GLM, arguments).read()
    yield from reader.optional(*_GLM.closes)


def minimax(calls: Calls, opening: str) -> Reading[None]:
    """Read <minimax:tool_call><invoke name="f"><parameter
    name="a">1</parameter></invoke></minimax:tool_call>."""
    reader = calls.reader
    more = (yield from reader.expect("<invoke name=", "</minimax:tool_call>")) == "<invoke name="
    if not more:
        return
    while more:
        arguments = TextArguments(calls, (yield from _line(reader, ">")).strip("\"' "))
        yield from _Tagged(reader, _MINIMAX, arguments).read()
        yield from reader.optional("</invoke>")
        yield from reader.blank()
        more = bool((yield from reader.either("<invoke name=")))
    yield from reader.optional("</minimax:tool_call>")


def llama3_json(calls: Calls, opening: str) -> Reading[None]:
    """Read {"name": "f", "parameters": {...}}; {...}, at the answer's beginning or after <|python_tag|>."""
    yield from _objects(calls, ("parameters", "arguments"), known_only=opening != "<|python_tag|>")


def mistral(calls: Calls, opening: str) -> Reading[None]:
    """Read [TOOL_CALLS]f[ARGS]{...} for each call, or [TOOL_CALLS][{"name": "f", ...}, ...]."""
    reader = calls.reader
    yield from reader.blank()
    name = yield from reader.word()
    if not name and (yield from reader.next_is("{")):
        yield from _objects(calls, ("arguments", "parameters"))
        return
    if not name:
        source = yield from reader.json()
        found = value_of(source)
        calls.add(*map(_with_id, found if isinstance(found, list) else [found]))
        return
    id_ = ""
    if (yield from reader.either("[CALL_ID]")):
        id_ = yield from reader.word()
    yield from reader.optional("[ARGS]")
    yield from json_arguments(calls, name, id_)


def _with_id(found: Any) -> ParsedCall:
    call = object_call(text_of(found))
    id_ = found.get("id")
    return replace(call, id=id_) if isinstance(id_, str) else call


_SEP, _CALL, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def deepseek_v3(calls: Calls, opening: str) -> Reading[None]:
    """Read function<sep>f and the arguments in a code block of JSON, for each call."""
    reader = calls.reader
    more = (yield from reader.expect(_CALL, _CALLS_END)) == _CALL
    while more:
        yield from _line(reader, _SEP)  # This is the kind of tool.
        name, _ = yield from reader.until("\n")
        yield from reader.optional("```json")
        yield from json_arguments(calls, name)
        yield from reader.optional("```")
        more = yield from _deepseek_goes_on(reader)


def deepseek_v31(calls: Calls, opening: str) -> Reading[None]:
    """Read f<sep>{...}, for each call."""
    reader = calls.reader
    more = (yield from reader.expect(_CALL, _CALLS_END)) == _CALL
    while more:
        name = yield from _line(reader, _SEP)
        yield from json_arguments(calls, name)
        more = yield from _deepseek_goes_on(reader)


def _deepseek_goes_on(reader: Reader) -> Reading[bool]:
    yield from reader.optional(_CALL_END)
    yield from reader.blank()
    more = yield from reader.either(_CALL, _CALLS_END)
    return more == _CALL
