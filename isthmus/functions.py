"""Python functions become tools: the schema comes from their type hints, and their calls are executed.

Parameters may have the types that JSON has: str, int, float, bool, None, Literal, list, dict with str keys,
unions of these, and Any. Annotated[T, "a sentence"] describes a parameter. Any other type is refused by name.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from isthmus.errors import InvalidRequest
from isthmus.values.message import Tool, ToolCall

AnyTool = Tool | Callable[..., Any]

_PLAIN: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    None: {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def tool_of(given: AnyTool, strict: bool = False) -> Tool:
    """Return the tool of a function, with its name and its docstring.

    Args:
        given: The function, or a Tool, which is returned as it is.
        strict: Whether the model's arguments must follow the schema.

    Raises:
        InvalidRequest: JSON has no type for a parameter, which the message names.
    """
    if isinstance(given, Tool):
        return given
    if not callable(given) or not hasattr(given, "__name__"):
        raise InvalidRequest(f"a tool is a Tool or a function, got {given!r}")
    description = inspect.cleandoc(given.__doc__ or "")
    return Tool(given.__name__, description, _parameters(given), strict, given)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"tool {function.__name__}: parameter {name}"
        if parameter.kind not in _NAMED:
            raise InvalidRequest(f"{where} cannot be given by its name")
        if name not in hints:
            raise InvalidRequest(f"{where} has no type hint")
        properties[name] = _schema(hints[name], where)
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        texts = [text for text in arguments[1:] if isinstance(text, str)]
        return {**_schema(arguments[0], where), **({"description": texts[0]} if texts else {})}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each, where) for each in arguments]}
    if origin in (list, Sequence):
        return {"type": "array", "items": _schema(arguments[0], where)}
    if origin in (dict, Mapping) and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
    try:
        return dict(_PLAIN[hint])
    except (KeyError, TypeError):
        raise InvalidRequest(
            f"{where} is {hint!r}, which has no JSON type here; write a Tool with a schema"
        ) from None


def result_of(tools: Sequence[Tool], call: ToolCall) -> tuple[Callable[[], Any] | None, str]:
    """Return the function to call and an empty text; or None and a message for the model if it names no tool,
    or arguments that the tool does not accept.
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return None, f"error: there is no tool {call.name}"
    if tool.function is None:
        raise InvalidRequest(f"tool {tool.name} is no function: answer its calls with tool_result")
    function, arguments = tool.function, call.arguments
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return None, f"error: {error}"
    return lambda: function(**arguments), ""


def text_of(result: Any) -> str:
    """Return a text as it is, and any other value as JSON. Raises TypeError if that is not possible."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
