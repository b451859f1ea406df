"""Tools of chat completions are those that may be called, the calls of past turns, and those of an answer."""

import json
from collections.abc import Iterable, Sequence

from services.router.dialects.dialect_answer import Json
from services.router.dialects.json_body import Body, InvalidParameter, check_list, check_text
from services.wire.isthmus.v1.generation_pb2 import Chat, Tool, ToolCall, ToolCallDelta, ToolChoice

_MODES = {
    "auto": ToolChoice.MODE_AUTO,
    "none": ToolChoice.MODE_NONE,
    "required": ToolChoice.MODE_REQUIRED,
}


def read_tools(body: Body, chat: Chat) -> None:
    chat.tools.extend(_read_tool(item, f"tools[{index}]") for index, item in enumerate(body.items("tools")))
    _read_choice(body.get("tool_choice"), chat)
    if body.get("parallel_tool_calls") is not None:
        chat.parallel_tool_calls = body.flag("parallel_tool_calls")


def read_calls(value: object, name: str) -> list[ToolCall]:
    return [_read_call(item, f"{name}[{index}]") for index, item in enumerate(check_list(value, name))]


def joined_calls(deltas: Iterable[ToolCallDelta]) -> list[Json]:
    calls: dict[int, Json] = {}
    for delta in deltas:
        function = calls.setdefault(
            delta.index,
            {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}},
        )["function"]
        function["arguments"] += delta.arguments
    return [calls[index] for index in sorted(calls)]


def call_deltas(deltas: Sequence[ToolCallDelta]) -> list[Json]:
    """Return the calls as a chunk has them: the id and the name come with a call's first piece alone, for
    clients put pieces together."""
    return [
        {
            "index": delta.index,
            **({"id": delta.id, "type": "function"} if delta.id else {}),
            "function": {**({"name": delta.name} if delta.name else {}), "arguments": delta.arguments},
        }
        for delta in deltas
    ]


def _read_tool(value: object, name: str) -> Tool:
    function = _function(value, name)
    name = f"{name}.function"
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidParameter(f"{name}.strict", "must be true or false")
    return Tool(
        name=check_text(function.get("name"), f"{name}.name"),
        description="" if description is None else check_text(description, f"{name}.description"),
        parameters=_json_text(function.get("parameters"), f"{name}.parameters"),
        strict=bool(strict),
    )


def _read_choice(value: object, chat: Chat) -> None:
    if value is None:
        return
    if isinstance(value, str) and value in _MODES:
        chat.tool_choice.mode = _MODES[value]
        return
    if not isinstance(value, dict):
        raise InvalidParameter("tool_choice", f"must be one of {', '.join(_MODES)}, or name a function")
    chosen = _function(value, "tool_choice")
    chat.tool_choice.name = check_text(chosen.get("name"), "tool_choice.function.name")


def _read_call(value: object, name: str) -> ToolCall:
    function = _function(value, name)
    assert isinstance(value, dict)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # Some clients send them so.
        arguments = _json_text(arguments, f"{name}.function.arguments")
    id_ = value.get("id")
    return ToolCall(
        id="" if id_ is None else check_text(id_, f"{name}.id"),
        name=check_text(function.get("name"), f"{name}.function.name"),
        arguments="" if arguments is None else check_text(arguments, f"{name}.function.arguments"),
    )


def _function(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    if value.get("type", "function") != "function":
        raise InvalidParameter(f"{name}.type", 'must be "function"; this server knows no other')
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{name}.function", "must be an object")
    return function


def _json_text(value: object, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    try:
        return check_text(json.dumps(value, ensure_ascii=False), name)
    except RecursionError as error:
        raise InvalidParameter(name, "is nested too deeply") from error
