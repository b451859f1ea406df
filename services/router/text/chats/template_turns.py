"""Turns as a chat template takes them: what differs between templates is tried once, when one is loaded.

arguments of calls    an object {"a": 1}, or the same as a string; tried in this order
content beside them   "" or null
ids of calls          as they are, or nine letters and digits
thinking              under the keys that templates read: all of them, or one where two would write it twice
thinking beside       one text, where the template refuses both beside a call
  content
"""

import json
import secrets
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from services.router.text.chats.answers import AnswerCall, digest
from services.router.text.chats.template_content import TemplateContent
from services.router.text.chats.turns import Turn

Message = dict[str, Any]
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = 9
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class TemplateTurns:
    """`render`: a chat, with tools, as the template writes it; may raise anything.

    `writes_calls`, `reads_tools`: whether the template does. `keeps_past_reasoning`: whether it shows what
    was thought before the last question.
    """

    def __init__(self, render: Callable[[list[Message], list[dict[str, Any]]], str]) -> None:
        self._render = render
        self._arguments_as_text = self._has_short_ids = False
        self._empty_content: str | None = ""
        self._reasoning_keys: Sequence[str] = _REASONING_KEYS
        self._joins_reasoning = False
        self._content = TemplateContent(self._rendered_chat)
        self.writes_calls = self._find_calls()
        if self.writes_calls:  # some take a tool's content behind a call alone
            self._content = TemplateContent(
                self._rendered_chat, lambda: [self.of(turn) for turn in self._of_calls("x")[:2]]
            )
        self.reads_tools = self._find_tools()
        self._find_reasoning_keys()
        self.keeps_past_reasoning = self._finds_past_reasoning()

    def of(self, turn: Turn) -> Message:
        """What to give the template."""
        message: Message = {"role": turn.role, "content": self._content.of(turn.role, turn.content)}
        if turn.calls:
            message["tool_calls"] = [self._call(call) for call in turn.calls]
            message["content"] = message["content"] or self._empty_content
        if turn.reasoning:
            self._set_reasoning(message, turn)
        if turn.tool_call_id:
            message["tool_call_id"] = self._id(turn.tool_call_id)
        if turn.name:
            message["name"] = turn.name
        return message

    def _call(self, call: AnswerCall) -> Message:
        arguments = call.arguments if self._arguments_as_text else json.loads(call.arguments)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _id(self, id_: str) -> str:
        if not self._has_short_ids or (len(id_) == _SHORT_ID and id_.isalnum()):
            return id_
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest(id_)[:_SHORT_ID])

    def _set_reasoning(self, message: Message, turn: Turn) -> None:
        reasoning = turn.reasoning
        if turn.calls and turn.content and self._joins_reasoning:
            texts = [turn.content] if isinstance(turn.content, str) else turn.content
            reasoning = "\n\n".join([reasoning, *texts])
            message["content"] = self._empty_content
        message.update(dict.fromkeys(self._reasoning_keys, reasoning))

    # -- what is tried ----------------------------------------------------------------------------

    def _find_calls(self) -> bool:
        """Whether calls can be shown at all; sets how."""
        for short_ids, content, as_text in product((False, True), ("", None), (False, True)):
            self._has_short_ids, self._empty_content, self._arguments_as_text = short_ids, content, as_text
            name, key, value = (secrets.token_hex(16) for _ in range(3))
            rendered = self._rendered(self._of_calls(name, json.dumps({key: value})))
            # A dict that is written out as Python has it, and a string that became a string of JSON.
            is_garbled = f"'{key}'" in rendered or f'\\"{key}' in rendered
            if all(text in rendered for text in (name, key, value)) and not is_garbled:
                return True
        self._has_short_ids, self._empty_content, self._arguments_as_text = False, "", False
        return False

    def _find_tools(self) -> bool:
        name = secrets.token_hex(16)
        parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
        function = {"name": name, "description": "x", "parameters": parameters}
        return name in self._rendered([Turn("user", "x")], [{"type": "function", "function": function}])

    def _find_reasoning_keys(self) -> None:
        reasoning = secrets.token_hex(16)
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

    def _finds_past_reasoning(self) -> bool:
        """Whether thinking is shown of what was answered before the last question."""
        reasoning = secrets.token_hex(16)
        past = Turn("assistant", "x", reasoning)
        return reasoning in self._rendered([Turn("user", "x"), past, Turn("user", "x")])

    def _of_calls(
        self, name: str, arguments: str = "{}", reasoning: str = "", content: str = ""
    ) -> list[Turn]:
        """A tool loop of one call and its result."""
        call = AnswerCall("call_0123456789abcdef", name, arguments)
        return [
            Turn("user", "x"),
            Turn("assistant", content, reasoning, (call,)),
            Turn("tool", "x", tool_call_id=call.id, name=name),
        ]

    def _rendered(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] = ()) -> str:
        """Empty where the template refuses them."""
        return self._rendered_chat([self.of(turn) for turn in turns], tools)

    def _rendered_chat(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            return self._render(messages, list(tools)) if messages else ""
        except Exception:  # a template raises what it likes
            return ""
