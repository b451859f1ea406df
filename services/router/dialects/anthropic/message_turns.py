"""Anthropic's messages are read as the turns of a chat.

a user's      tool_result, tool_result, text, text  ->  tool, tool, user
a model's     thinking, text, tool_use              ->  assistant, with its reasoning and calls
"""

from collections.abc import Iterator
from itertools import groupby

from services.router.dialects.json_body import Body, check_text, json_text
from services.values.request import is_id
from services.wire.isthmus.v1.generation_pb2 import ChatMessage, ToolCall

_TURN_ROLES = ("user", "assistant", "system")
# Claude Code's first line of a system has a hash that changes with each call, and no prefix would ever come
# twice.
_BILLING = "x-anthropic-billing-header:"
_ERROR = "Error: "  # It stands before a result that is one: no template has a place for that.


def read_turns(body: Body) -> list[ChatMessage]:
    messages = body.objects("messages")
    if not messages:
        raise body.wrong("messages", "must be a list of at least one message")
    turns = [*_system(body), *(turn for message in messages for turn in _read_message(message))]
    if turns[-1].role == "assistant" and turns[-1].tool_calls:
        raise messages[-1].wrong("content", "must not have tool_use where the answer goes on with it")
    return turns


def _system(body: Body) -> list[ChatMessage]:
    parts = [part for part in map(_without_billing, _texts(body, "system")) if part]
    return [ChatMessage(role="system", parts=parts)] if parts else []


def _without_billing(part: str) -> str:
    return part.partition("\n")[2] if part.startswith(_BILLING) else part


def _read_message(message: Body) -> Iterator[ChatMessage]:
    role = message.required_text("role")
    if role not in _TURN_ROLES:
        raise message.wrong("role", f"must be one of {', '.join(_TURN_ROLES)}")
    if isinstance(message.get("content"), str):
        return iter([ChatMessage(role=role, content=message.text("content"))])
    blocks = message.objects("content")
    if not blocks and role != "assistant":
        raise message.wrong("content", "must be a string or at least one block")
    return iter([_model_turn(blocks)]) if role == "assistant" else _other_turns(role, blocks)


def _other_turns(role: str, blocks: list[Body]) -> Iterator[ChatMessage]:
    for kind, group in groupby(blocks, key=lambda block: block.required_text("type")):
        if kind == "tool_result" and role == "user":
            yield from map(_result, group)
        else:
            yield ChatMessage(role=role, parts=[_text(block) for block in group])


def _result(block: Body) -> ChatMessage:
    parts = _texts(block, "content")
    if block.flag("is_error"):
        parts = [_ERROR + "".join(parts[:1]), *parts[1:]]
    content = parts[0] if len(parts) == 1 else ""
    return ChatMessage(
        role="tool",
        tool_call_id=block.required_text("tool_use_id"),
        content=content,
        parts=parts if len(parts) > 1 else [],
    )


def _model_turn(blocks: list[Body]) -> ChatMessage:
    turn, texts, thoughts = ChatMessage(role="assistant"), [], []
    for block in blocks:
        kind = block.required_text("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
            turn.answer_id = _handle(block.text("signature")) or turn.answer_id
        elif kind == "tool_use":
            turn.tool_calls.append(_call(block))
        else:
            texts.append(_text(block))
    turn.content, turn.reasoning = "".join(texts), "".join(thoughts)
    return turn


def _handle(signature: str) -> str:
    """Return the handle of an answer. One that cannot be ours names nothing here: a conversation may have
    begun elsewhere."""
    return signature if is_id(signature) else ""


def _call(block: Body) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise block.wrong("input", "must be an object")
    return ToolCall(
        id=block.required_text("id"),
        name=block.required_text("name"),
        arguments=json_text(arguments, block.name_of("input")),
    )


def _texts(holder: Body, name: str) -> list[str]:
    value = holder.get(name)
    if isinstance(value, str):
        return [check_text(value, holder.name_of(name))]
    return [_text(block) for block in holder.objects(name)]


def _text(block: Body) -> str:
    kind = block.required_text("type")
    if kind != "text":
        raise block.wrong("type", f"is {kind!r}, which this server does not read here; it reads text")
    return block.required_text("text")
