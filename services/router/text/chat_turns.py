"""A chat's messages and tools are checked and become turns for templates. Errors name the field."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.router.tenant_lru import TenantLru
from services.router.text.answer_message import (
    AnswerCall,
    as_object,
    canonical_json,
    digest,
    with_whole_characters,
)
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, Tool, ToolCall, ToolChoice

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_VARIABLES_BYTES = 4096
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_ENTRY_BYTES = 256  # An entry of a table takes about this much memory beside its text.
_MOST_TOOLS = 1024
_MOST_CHARS = 256 << 10  # Comparing this much for the first time takes some 15 ms.
_OF_ASSISTANTS = ("token_ids", "reasoning", "tool_calls", "answer_id")

Content = str | Sequence[str]  # A sequence holds parts.
_AsSent = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: Content = ""
    reasoning: str = ""
    calls: tuple[AnswerCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """This is a chat for a template, with `tools` in OpenAI's format and the template's `variables`. Where it
    `continues`, the last turn is the model's, and the answer continues it. `origins` are, for each turn, the
    indices of the messages that it was made of, in order."""

    turns: Sequence[Turn]
    tools: Sequence[dict[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    origins: Sequence[tuple[int, ...]] = ()
    may_call: bool = True

    def name_of(self, index: int) -> str:
        return f"chat.messages[{self.origins[index][0]}]" if self.origins[index] else "chat.messages"


def read_chat(chat: Chat) -> ChatTurns:
    if not chat.messages:
        raise InvalidRequest("chat.messages", "must hold at least one message")
    turns = [_turn(message, f"chat.messages[{index}]") for index, message in enumerate(chat.messages)]
    tools = [_tool(tool, f"chat.tools[{index}]") for index, tool in enumerate(chat.tools) if not tool.hidden]
    if chat.continue_final_message:
        _check_continued(chat.messages[-1], f"chat.messages[{len(turns) - 1}]")
    return ChatTurns(
        turns,
        tools,
        _read_variables(chat.chat_template_kwargs),
        chat.continue_final_message,
        [(index,) for index in range(len(turns))],
        may_call=chat.tool_choice.mode != ToolChoice.MODE_NONE,
    )


def _check_continued(last: ChatMessage, name: str) -> None:
    if last.role != "assistant":
        raise InvalidRequest(
            "chat.continue_final_message", f"needs a last message of the assistant's: {name}"
        )
    if last.tool_calls:
        raise InvalidRequest(f"{name}.tool_calls", "must be empty where the answer goes on with its content")
    if not (content_of(last) or last.token_ids):
        raise InvalidRequest(f"{name}.content", "must not be empty where the answer goes on with it")


def content_of(message: ChatMessage) -> str:
    return message.content or "".join(message.parts)


def with_text(turn: Turn, text: str) -> Turn:
    content = turn.content if isinstance(turn.content, str) else "".join(turn.content)
    return replace(turn, content="\n".join(filter(None, [content, text])), calls=())


def _turn(message: ChatMessage, name: str) -> Turn:
    if message.role not in ROLES:
        raise InvalidRequest(f"{name}.role", f"must be one of {', '.join(ROLES)}; got {message.role!r}")
    if message.parts and message.content:
        raise InvalidRequest(f"{name}.parts", "and its content must not both be set")
    if message.role != "assistant":
        for field in _OF_ASSISTANTS:
            if getattr(message, field):
                raise InvalidRequest(f"{name}.{field}", "may only be set for an assistant's turn")
    if message.tool_call_id and message.role != "tool":
        raise InvalidRequest(f"{name}.tool_call_id", "may only be set for a tool's turn")
    return Turn(
        message.role,
        list(message.parts) or message.content,
        message.reasoning,
        tuple(_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)),
        message.tool_call_id,
        message.name,
    )


def _call(call: ToolCall, name: str) -> AnswerCall:
    if not call.name:
        raise InvalidRequest(f"{name}.name", "must not be empty")
    # A model's answer may have broken off in a call. Agents send it back, in every later turn.
    return AnswerCall(call.id, call.name, with_whole_characters(as_object(call.arguments)))


def _tool(tool: Tool, name: str) -> dict[str, Any]:
    if not tool.name:
        raise InvalidRequest(f"{name}.name", "must not be empty")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _read_object(tool.parameters, f"{name}.parameters") or _NO_PARAMETERS
    return {"type": "function", "function": function}


def _read_variables(text: str) -> Mapping[str, Any]:
    name = "chat.chat_template_kwargs"
    if len(text.encode()) > _MAX_VARIABLES_BYTES:
        raise InvalidRequest(name, f"must be at most {_MAX_VARIABLES_BYTES} bytes of JSON")
    return _read_object(text, name)


def _read_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # Half of a surrogate pair cannot be encoded.
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be a JSON object")
    return value


class ToolSpellings:
    """This gives equal tools the spelling that was used first, so that the prompts that show them have a
    common prefix.

    Clients may write the keys of a schema in another order after a restart, which is another prompt to a
    cache of prefixes. For each tenant the first spelling of a tool's parameters is remembered. Tools are
    equal if their names, their descriptions and their parameters as JSON values are; the order of keys is no
    part of a JSON value (RFC 8259, 4).
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: TenantLru[_AsSent, str] = TenantLru(max_bytes // 2)
        self._first: TenantLru[bytes, str] = TenantLru(max_bytes // 2)

    @property
    def size_bytes(self) -> int:
        return self._known.size + self._first.size

    def restore(self, tenant: str, chat: Chat) -> None:
        """Give each tool of the chat the tenant's first spelling, unless comparing takes too long."""
        if len(chat.tools) > _MOST_TOOLS or sum(len(tool.parameters) for tool in chat.tools) > _MOST_CHARS:
            return
        for tool in chat.tools:
            spelling = self._spelling(tenant, (tool.name, tool.description, tool.parameters))
            if spelling != tool.parameters:
                tool.parameters = spelling

    def _spelling(self, tenant: str, as_sent: _AsSent) -> str:
        known = self._known.get(tenant, as_sent)
        if known is not None:
            return known
        name, description, parameters = as_sent
        value = digest(name, description, canonical_json(parameters))
        first = self._first.get(tenant, value)
        if first is None:
            first = parameters
            self._first.put(tenant, value, first, len(first) + _ENTRY_BYTES)
        self._known.put(tenant, as_sent, first, sum(map(len, as_sent)) + _ENTRY_BYTES)
        return first
