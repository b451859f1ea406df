"""These are further formats with tags; each has a reading here. The module is pure.

    <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>
    <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>

The readings begin and end as those of calls.py do.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.router.parsing.arguments import TypedText
from services.router.parsing.calls import Calls, TextArguments, json_arguments, qwen3_coder
from services.router.parsing.reader import Reader, Reading, Unreadable

_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")


@dataclass(frozen=True, slots=True)
class Tags:
    """These are a family's tags: the beginnings up to the attributes, and the closing tags. `closes` closes a
    block of calls. `ends` ends a tag with attributes."""

    call: str
    call_ends: str
    parameter: str
    parameter_ends: str
    closes: tuple[str, ...] = ()
    ends: str = ">"

    def read(self, calls: Calls, opening: str) -> Reading[None]:
        if opening == self.call:
            yield from self._call(calls)
            return
        while (yield from calls.reader.expect(self.call, *self.closes)) == self.call:
            yield from self._call(calls)

    def _call(self, calls: Calls) -> Reading[None]:
        reader = calls.reader
        named = _attributes((yield from reader.line(self.ends)))
        arguments = TextArguments(calls, named.get("name") or named.get("tool", ""))
        while (yield from reader.expect(self.parameter, self.call_ends)) == self.parameter:
            named = _attributes((yield from reader.line(self.ends)))
            is_text = named.get("string") == "true" or named.get("type") == "string"
            key = named.get("name") or named.get("key", "")
            yield from arguments.read(key, partial(_verbatim, reader, self.parameter_ends), is_text)
        arguments.end()


def _attributes(text: str) -> Mapping[str, str]:
    return {found[1]: found[2] or found[3] or found[4] or "" for found in _ATTRIBUTE.finditer(text)}


_CDATA, _CDATA_ENDS = "<![CDATA[", "]]>"


def _verbatim(reader: Reader, end: str, sink: Callable[[str], object]) -> Reading[None]:
    """Read a parameter's text as it is, or from a CDATA section, in which tags are text."""
    if (yield from reader.either(_CDATA)):
        yield from _upto(reader, _CDATA_ENDS, sink)
        yield from reader.expect(end)
    else:
        yield from _upto(reader, end, sink)


def _upto(reader: Reader, end: str, sink: Callable[[str], object]) -> Reading[None]:
    if (yield from reader.upto((end,), sink)) is None:
        raise Unreadable


_D = "｜DSML｜"
DSML_OPENS = (f"<{_D}function_calls>", f"<{_D}tool_calls>")
DSML = Tags(
    f"<{_D}invoke",
    f"</{_D}invoke>",
    f"<{_D}parameter",
    f"</{_D}parameter>",
    tuple(opens.replace("<", "</") for opens in DSML_OPENS),
)
MINICPM = Tags("<function ", "</function>", "<param", "</param>")
MUSE_OPENS, _MUSE_MESSAGE = "<atem:function_calls>", "<|message|>"
_MUSE = Tags(
    *("<atem:invoke", "</atem:invoke>", "<atem:parameter", "</atem:parameter>"),
    ("</atem:function_calls>",),
)


def muse(calls: Calls, opening: str) -> Reading[None]:
    """Read to=f<|message|><atem:function_calls>..., which is a separate message and may lack its header."""
    reader = calls.reader
    if opening != MUSE_OPENS:
        yield from reader.expect("to=")
        yield from reader.line(_MUSE_MESSAGE)
        yield from reader.expect(MUSE_OPENS)
    yield from _MUSE.read(calls, MUSE_OPENS)
    yield from reader.optional("<|eom|>")


KIMI_K3_OPENS = "<|open|>tools<|sep|>"
KIMI_K3 = Tags(
    "<|open|>call",
    "<|close|>call<|sep|>",
    "<|open|>argument",
    "<|close|>argument<|sep|>",
    ("<|close|>tools<|sep|>",),
    "<|sep|>",
)

KIMI_SECTION, KIMI_SECTION_ENDS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_ENDS = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"""(?:functions\.)?([^\s"'<>{}\[\]]+?)(?::\d+)?""")


def kimi_k2(calls: Calls, opening: str) -> Reading[None]:
    """Read for each call an id, which contains the name, and the arguments. A marker may be missing."""
    reader = calls.reader
    marker = opening if opening == KIMI_CALL else (yield from reader.expect(KIMI_CALL, KIMI_SECTION_ENDS))
    while marker == KIMI_CALL:
        yield from reader.blank()
        id_ = _KIMI_ID.fullmatch((yield from reader.line(KIMI_ARGUMENTS)).strip())
        if id_ is None:
            raise Unreadable
        yield from json_arguments(calls, id_[1], id_[0])
        yield from reader.optional(KIMI_CALL_ENDS)
        yield from reader.blank()
        marker = yield from reader.either(KIMI_CALL, KIMI_SECTION_ENDS)


SEED_OPENS, SEED_ENDS = "<seed:tool_call>", "</seed:tool_call>"
_FUNCTION = "<function="


def seed(calls: Calls, opening: str) -> Reading[None]:
    """Read as qwen3_coder does, with other tags."""
    reader = calls.reader
    if opening == SEED_OPENS:
        yield from reader.expect(_FUNCTION)
    begun = _FUNCTION
    while begun:
        yield from qwen3_coder(calls, begun)
        yield from reader.blank()
        begun = yield from reader.either(_FUNCTION)
    yield from reader.optional(SEED_ENDS)


HY_OPENS = "<tool_calls:opensource>"
HY_MARKERS = tuple(
    f"<{slash}{name}:opensource>"
    for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    for slash in ("", "/")
)


def hy(calls: Calls, opening: str) -> Reading[None]:
    """Read <tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>, where each tag
    contains :opensource."""
    reader = calls.reader
    _, calls_end, call, call_ends, sep, _, key, key_ends, value, value_ends = HY_MARKERS
    while (yield from reader.expect(call, calls_end)) == call:
        arguments = TextArguments(calls, (yield from reader.line(sep)))
        while (yield from reader.expect(key, call_ends)) == key:
            name, _ = yield from reader.until(key_ends)
            yield from reader.expect(value)
            yield from arguments.read(name.strip(), partial(_upto, reader, value_ends))
        arguments.end()


MINIMAX_M3 = "]<]minimax[>["
MINIMAX_M3_OPENS = f"{MINIMAX_M3}<tool_call>"
_ITEM = "item"
_MAX_DEPTH = 64
# An element has text, or elements by their names.
_Element = str | list[tuple[str, Any]]


def minimax_m3(calls: Calls, opening: str) -> Reading[None]:
    """Read <invoke name="f"><a>1</a><b><item>x</item></b></invoke>, each tag after ]<]minimax[>[."""
    reader = calls.reader
    call, calls_end = f"{MINIMAX_M3}<invoke name=", f"{MINIMAX_M3}</tool_call>"
    while (yield from reader.expect(call, calls_end)) == call:
        name = (yield from reader.line(">")).strip("\"' ")
        schema = calls.schemas.get(name)
        arguments, typed = TextArguments(calls, name), TypedText(schema)
        while not (yield from _closes_or_opens(reader, "invoke")):
            key = yield from reader.line(">")
            if typed.is_string(key):
                yield from arguments.read(key, partial(_upto, reader, f"{MINIMAX_M3}</{key}>"))
            else:
                element = yield from _element(reader, key, 0)
                arguments.add(key, _valued(element, key, schema, schema))
        arguments.end()


def _closes_or_opens(reader: Reader, name: str) -> Reading[bool]:
    yield from reader.expect(MINIMAX_M3)
    return (yield from reader.expect(f"</{name}>", "<")) != "<"


def _element(reader: Reader, name: str, depth: int) -> Reading[_Element]:
    if depth > _MAX_DEPTH or name.startswith("/"):
        raise Unreadable
    inner: list[tuple[str, Any]] = []
    while True:
        text, _ = yield from reader.until(MINIMAX_M3)
        if (yield from reader.expect(f"</{name}>", "<")) != "<":
            return inner or text
        within = yield from reader.line(">")
        inner.append((within, (yield from _element(reader, within, depth + 1))))


def _valued(element: _Element, name: str, schema: Any, root: Any) -> Any:
    typed = TypedText(schema, root)
    if isinstance(element, str):
        return typed.empty(name) if not element and not typed.takes_text(name) else typed.value(name, element)
    is_list = typed.is_list(name) if typed.is_known(name) else all(key == _ITEM for key, _ in element)
    own = typed.within(name)
    if is_list:
        items = {"properties": {_ITEM: own.get("items")}}
        return [_valued(each, _ITEM, items, root) for _, each in element]
    return {key: _valued(each, key, own, root) for key, each in element}
