"""A chat template takes turns in its own format, which is found by trials when the template is loaded.

    arguments of calls    an object {"a": 1}, or the same as a string; tried in this order
    content beside them   "" or null
    ids of calls          as they are; of nine letters and digits, always or where they are shorter; or the
                          call's text, functions.NAME:0, where the template writes that in place of its name
    thinking              under the keys that templates read: all of them, or one where two would write it
                          twice; or as a part of the content
    thinking beside       one text, where the template refuses both beside a call
      content
    tools                 as they are, or with an empty description or properties
    order                 as turn_order.py finds it

A chat template takes a message's content as a string, or as a list of parts as vision models have it.

    content        template takes strings        template takes lists alone
    "a"            "a"                           [{"type": "text", "text": "a"}]

    parts          template takes lists          template takes strings alone
    "a", "b"       [{..."a"}, {..."b"}]          "a\\nb"

This differs by role, and only the template knows it, so it is tried once.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product
from typing import Any

from services.router.text.answer_message import AnswerCall, digest
from services.router.text.chat_turns import Content, Turn
from services.router.text.turn_order import chance, find_order

Rendered = str | list[dict[str, str]]

_SEPARATOR = "\n"
# These go before and after a message of the role, for templates that require an order.
_BEFORE = {"assistant": ("user",), "tool": ("user", "assistant")}
_AFTER = {"system": ("user",), "developer": ("user",)}


def _no_call() -> list[dict[str, Any]]:
    return _others(_BEFORE, "tool")


class TemplateContent:
    def __init__(
        self,
        render: Callable[[list[dict[str, Any]]], str],
        call: Callable[[], list[dict[str, Any]]] = _no_call,
    ) -> None:
        self._render = render
        self._call = call
        self._takes_text: dict[str, bool] = {}
        self._takes_parts: dict[str, bool] = {}

    def of(self, role: str, content: Content) -> Rendered:
        if role not in self._takes_parts:
            self._try(role)
        if isinstance(content, str):
            only_parts = self._takes_parts[role] and not self._takes_text[role]
            return _as_parts([content]) if only_parts else content
        return _as_parts(content) if self._takes_parts[role] else _SEPARATOR.join(content)

    def _try(self, role: str) -> None:
        first, second, alien = (chance() for _ in range(3))
        self._takes_text[role] = first in self._rendered(role, first)
        parts = _as_parts([first, second])
        parts[0]["note"] = alien  # This shows where a list is written out as it is.
        rendered = self._rendered(role, parts)
        self._takes_parts[role] = first in rendered and second in rendered and alien not in rendered

    def _rendered(self, role: str, content: Rendered) -> str:
        message = {"role": role, "content": content}
        before = self._call() if role == "tool" else _others(_BEFORE, role)
        after = _others(_AFTER, role)
        try:
            return self._render([*before, message, *after])
        except Exception:  # A template may raise anything.
            return ""


def _others(roles: Mapping[str, Sequence[str]], role: str) -> list[dict[str, Any]]:
    return [{"role": other, "content": "x"} for other in roles.get(role, ())]


def _as_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


Message = dict[str, Any]
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = 9
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CALL_ID = "call_0123456789abcdef"
_TEXT_ID = re.compile(r"functions\..+:[0-9]+")
_HTML_QUOTES = ("&#34;", "&quot;")
# These members may be missing in a tool.
_FILLED = ((), ("description",), ("properties",), ("description", "properties"))
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
EXAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "x", "parameters": _PARAMETERS},
}


class CallIds(Enum):
    ANY = "as they are"
    SHORT = "nine letters or digits"
    LONG = "nine characters or more"
    TEXT = "functions.NAME:0, which is what it writes of the call's name"


class TemplateTurns:
    """`render` renders a chat and tools with the template, and may raise anything. It is tried with `tools`;
    a model may have one template for chats with tools, and another for those without.

    `writes_calls` and `reads_tools` say whether the template does so, `keeps_past_reasoning` whether it shows
    the thinking before the last question, `shows_ids` whether it writes a call's id. It takes turns in
    `order`.
    """

    def __init__(
        self,
        render: Callable[[list[Message], list[dict[str, Any]]], str],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        names_developers: bool = False,
    ) -> None:
        self._render = render
        self._tools = [dict(tool) for tool in tools]
        self._arguments_as_text = False
        self._ids = CallIds.ANY
        self._empty_content: str | None = ""
        self._reasoning_keys: Sequence[str] = _REASONING_KEYS
        self._joins_reasoning = self._thinks_in_parts = False
        self._content = TemplateContent(self._rendered_chat)
        self.writes_calls = self._find_calls()
        if self.writes_calls:  # Some templates take a tool's content only after a call.
            self._content = TemplateContent(
                self._rendered_chat, lambda: [self.of(turn) for turn in self._of_calls("x")[:2]]
            )
            self._find_ids()
        self.shows_ids = self._find_shown_ids()
        self._filled = self._find_filled()
        self.reads_tools = self._filled is not None
        self._find_reasoning_keys()
        self.keeps_past_reasoning = self._finds_past_reasoning()
        loop = (
            self._of_calls("f") if self.writes_calls else [Turn("user"), Turn("assistant", "x"), Turn("tool")]
        )
        order = find_order(self._rendered, loop, names_developers=names_developers)
        self.order = replace(order, several_calls=self._finds_several_calls())

    def of(self, turn: Turn) -> Message:
        message: Message = {"role": turn.role, "content": self._content.of(turn.role, turn.content)}
        if turn.calls:
            message["tool_calls"] = [self._call(call) for call in turn.calls]
            message["content"] = message["content"] or self._empty_content
        if turn.reasoning:
            self._set_reasoning(message, turn)
        if turn.tool_call_id or (turn.role == "tool" and self._ids is not CallIds.ANY):
            message["tool_call_id"] = self._id(turn.tool_call_id, turn.name)
        if turn.name:
            message["name"] = turn.name
        return message

    def _call(self, call: AnswerCall) -> Message:
        arguments = call.arguments if self._arguments_as_text else json.loads(call.arguments)
        return {
            "id": self._id(call.id, call.name),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _id(self, id_: str, name: str) -> str:
        match self._ids:
            case CallIds.TEXT:
                return id_ if _is_text(id_) else f"functions.{name}:0"
            case CallIds.SHORT if not (len(id_) == _SHORT_ID and id_.isalnum()):
                return _short(id_)
            case CallIds.LONG if len(id_) < _SHORT_ID:
                return _short(id_)
        return id_

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(tool.get("function", {}))
        parameters = function.pop("parameters", {})
        if "description" in (self._filled or ()):
            function.setdefault("description", "")
        if "properties" in (self._filled or ()):
            parameters = {**parameters, "properties": parameters.get("properties", {})}
        return {**tool, "function": {**function, "parameters": parameters}}

    def with_own_ids(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns with calls, whose ids are their text, numbered through the chat, and their
        results accordingly."""
        return _numbered(turns) if self._ids is CallIds.TEXT else list(turns)

    def _set_reasoning(self, message: Message, turn: Turn) -> None:
        reasoning = turn.reasoning
        if turn.calls and turn.content and self._joins_reasoning:
            reasoning = "\n\n".join([reasoning, *_texts(turn.content)])
            message["content"] = self._empty_content
        if self._thinks_in_parts:
            texts = [{"type": "text", "text": text} for text in _texts(turn.content)]
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *texts]
        else:
            message.update(dict.fromkeys(self._reasoning_keys, reasoning))

    # -- what is tried ----------------------------------------------------------------------------

    def _find_calls(self) -> bool:
        for ids, content, as_text in product((CallIds.ANY, CallIds.SHORT), ("", None), (False, True)):
            self._ids, self._empty_content, self._arguments_as_text = ids, content, as_text
            name, key, value = (chance() for _ in range(3))
            rendered = self._rendered(self._of_calls(name, json.dumps({key: value})))
            # These begin a dict as Python writes it, and a string that was escaped for JSON or HTML.
            is_garbled = f"'{key}'" in rendered or f'\\"{key}' in rendered
            is_garbled = is_garbled or any(quote in rendered for quote in _HTML_QUOTES)
            if all(text in rendered for text in (name, key, value)) and not is_garbled:
                return True
        self._ids, self._empty_content, self._arguments_as_text = CallIds.ANY, "", False
        return False

    def _find_ids(self) -> None:
        if self._ids is CallIds.ANY and not self._shows_name():
            self._ids = CallIds.TEXT
            if not self._shows_name():
                self._ids = CallIds.ANY
        if self._ids is CallIds.ANY and not self._rendered(self._of_calls("f", id_="1")):
            self._ids = CallIds.LONG

    def _shows_name(self) -> bool:
        name = chance()
        return name in self._rendered([replace(turn, name="") for turn in self._of_calls(name)])

    def _find_shown_ids(self) -> bool:
        id_ = chance()[:_SHORT_ID]
        return self._ids is CallIds.TEXT or id_ in self._rendered(self._of_calls("f", id_=id_))

    def _find_filled(self) -> tuple[str, ...] | None:
        """Return the members that a tool must have though OpenAI's schema does not require them, or None
        where no tools are shown."""
        for self._filled in _FILLED:
            name = chance()
            function = {"name": name, "parameters": {"type": "object"}}
            if name in self._rendered(
                [Turn("user", "x")], [self.tool({"type": "function", "function": function})]
            ):
                return self._filled
        name = chance()
        function = {**EXAMPLE_TOOL["function"], "name": name}
        rendered = self._rendered([Turn("user", "x")], [{"type": "function", "function": function}])
        return _FILLED[-1] if name in rendered else None

    def _find_reasoning_keys(self) -> None:
        reasoning = chance()
        if self.writes_calls:
            alone, both = (
                self._rendered(self._of_calls("x", reasoning=reasoning, content=content))
                for content in ("", "x")
            )
            self._joins_reasoning = bool(alone) and not both
        for keys in (_REASONING_KEYS, *((key,) for key in _REASONING_KEYS)):
            self._reasoning_keys = keys
            written = [
                self._rendered(chat).count(reasoning)
                for chat in (
                    [Turn("user", "x"), Turn("assistant", "x", reasoning)],
                    self._of_calls("x", reasoning=reasoning) if self.writes_calls else [],
                )
            ]
            if max(written) == 1:
                return
        self._reasoning_keys = _REASONING_KEYS
        self._thinks_in_parts = self._takes_thinking_parts()

    def _takes_thinking_parts(self) -> bool:
        thought, alien = chance(), chance()
        parts = [
            # The note shows where a list is written as it is.
            {"type": "thinking", "thinking": thought, "note": alien},
            {"type": "text", "text": "x"},
        ]
        question = self.of(Turn("user", "x"))
        rendered = self._rendered_chat([question, {"role": "assistant", "content": parts}])
        return rendered.count(thought) == 1 and alien not in rendered

    def _finds_past_reasoning(self) -> bool:
        reasoning = chance()
        past = Turn("assistant", "x", reasoning)
        return reasoning in self._rendered([Turn("user", "x"), past, Turn("user", "x")])

    def _finds_several_calls(self) -> bool:
        names = [chance(), chance()]
        calls = tuple(AnswerCall(_CALL_ID[:-1] + str(n), name, "{}") for n, name in enumerate(names))
        results = [Turn("tool", "x", tool_call_id=call.id, name=call.name) for call in calls]
        rendered = self._rendered([Turn("user", "x"), Turn("assistant", "", "", calls), *results])
        return not self.writes_calls or all(name in rendered for name in names)

    def _of_calls(
        self, name: str, arguments: str = "{}", reasoning: str = "", content: str = "", id_: str = _CALL_ID
    ) -> list[Turn]:
        call = AnswerCall(id_, name, arguments)
        return [
            Turn("user", "x"),
            Turn("assistant", content, reasoning, (call,)),
            Turn("tool", "x", tool_call_id=call.id, name=name),
        ]

    def _rendered(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] = ()) -> str:
        return self._rendered_chat([self.of(turn) for turn in turns], tools)

    def _rendered_chat(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            return self._render(messages, list(tools) or self._tools) if messages else ""
        except Exception:  # A template may raise anything.
            return ""


def _is_text(id_: str) -> bool:
    return _TEXT_ID.fullmatch(id_) is not None


def _numbered(turns: Sequence[Turn]) -> list[Turn]:
    """Number the calls without using an id that the chat already has. A result without an id belongs to the
    first call before it without a result and, if the result has a name, of that name."""
    own = {call.id for turn in turns for call in turn.calls if _is_text(call.id)}
    ids: dict[str, str] = {}
    open_calls: list[AnswerCall] = []
    named, number = [], 0
    for turn in turns:
        calls = []
        for call in turn.calls:
            id_ = call.id
            if not _is_text(id_):
                while (id_ := f"functions.{call.name}:{number}") in own:
                    number += 1
            number += 1
            if call.id:
                ids[call.id] = id_
            calls.append(replace(call, id=id_))
        open_calls = calls or open_calls
        id_ = ids.get(turn.tool_call_id, turn.tool_call_id)
        if turn.role == "tool":
            id_ = id_ or next((call.id for call in open_calls if turn.name in ("", call.name)), "")
            open_calls = [call for call in open_calls if call.id != id_]
        named.append(replace(turn, calls=tuple(calls), tool_call_id=id_))
    return named


def _short(id_: str) -> str:
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest(id_)[:_SHORT_ID])


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) and content else list(content)
