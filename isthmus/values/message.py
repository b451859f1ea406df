"""A chat has messages, the tool calls in them, and tools."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from isthmus.errors import InvalidRequest
from services.wire.isthmus.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments_json` is the JSON object that the model wrote."""

    id: str
    name: str
    arguments_json: str = "{}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name. Raises InvalidRequest if they are no JSON object, which those of an
        answer always are.
        """
        try:
            value = json.loads(self.arguments_json or "{}")
        except ValueError as error:
            raise InvalidRequest(f"the arguments of {self.name} are no JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"the arguments of {self.name} are no JSON object")
        return value


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is system, developer, user, assistant or tool. With `token_ids` or `answer_id` a past answer is
    sent as its own ids, so that its cached KV is found.
    """

    role: str
    content: str = ""
    parts: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    answer_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is a JSON schema; empty means none. `function`, if given, is what `Conversation.run`
    calls.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    function: Callable[..., Any] | None = None


_FIELDS = {member.name for member in fields(Message)}


def message_of(given: Message | Mapping[str, Any], where: str) -> Message:
    """Return the message. Raises InvalidRequest that names an unknown field of `where`."""
    if isinstance(given, Message):
        return given
    if unknown := sorted(set(given) - _FIELDS):
        raise InvalidRequest(f"{where} has {', '.join(unknown)}; it takes {', '.join(sorted(_FIELDS))}")
    if "role" not in given:
        raise InvalidRequest(f"{where} has no role")
    return Message(**given)


def message_to_proto(message: Message) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        parts=message.parts,
        token_ids=message.token_ids,
        reasoning=message.reasoning,
        tool_calls=[
            generation_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments_json)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
        answer_id=message.answer_id,
    )


def tool_to_proto(tool: Tool) -> generation_pb2.Tool:
    return generation_pb2.Tool(
        name=tool.name,
        description=tool.description,
        parameters=json.dumps(tool.parameters) if tool.parameters else "",
        strict=tool.strict,
    )
