"""A chat template takes a message's content as a string, or as a list of parts as vision models have it.

    content        template takes strings        template takes lists alone
    "a"            "a"                           [{"type": "text", "text": "a"}]

    parts          template takes lists          template takes strings alone
    "a", "b"       [{..."a"}, {..."b"}]          "a\\nb"

Which it is differs by role, and nothing but the template says it: it is tried once.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.router.text.chats.chat_turns import Content

Rendered = str | list[dict[str, str]]

_SEPARATOR = "\n"
# These stand around a message of the role, so that a template which wants an order has one.
_BEFORE = {"assistant": ("user",), "tool": ("user", "assistant")}
_AFTER = {"system": ("user",), "developer": ("user",)}


def _no_call() -> list[dict[str, Any]]:
    return _others(_BEFORE, "tool")


class TemplateContent:
    """`render` writes a chat as the template does, and may raise anything. `call` makes messages before a
    tool's."""

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
        first, second, alien = (secrets.token_hex(16) for _ in range(3))
        self._takes_text[role] = first in self._rendered(role, first)
        parts = _as_parts([first, second])
        parts[0]["note"] = alien  # it shows where a list is written out as it is
        rendered = self._rendered(role, parts)
        self._takes_parts[role] = first in rendered and second in rendered and alien not in rendered

    def _rendered(self, role: str, content: Rendered) -> str:
        message = {"role": role, "content": content}
        before = self._call() if role == "tool" else _others(_BEFORE, role)
        after = _others(_AFTER, role)
        try:
            return self._render([*before, message, *after])
        except Exception:  # a template raises what it likes
            return ""


def _others(roles: Mapping[str, Sequence[str]], role: str) -> list[dict[str, Any]]:
    return [{"role": other, "content": "x"} for other in roles.get(role, ())]


def _as_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
