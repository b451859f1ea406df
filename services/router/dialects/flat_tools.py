"""Functions that a model may call are read here where they lie flat in a body."""

from collections.abc import Iterable

from services.router.dialects.json_body import Body, InvalidParameter, json_text
from services.wire.isthmus.v1.generation_pb2 import Tool


def read_function(function: Body, schema: str = "parameters") -> Tool:
    """Return the tool. `schema` is what this API calls the schema of its arguments."""
    parameters = function.get(schema)
    if not isinstance(parameters, dict | None):
        raise function.wrong(schema, "must be an object: a JSON schema")
    return Tool(
        name=_read_name(function),
        description=function.text("description"),
        parameters=json_text(parameters, function.name_of(schema)) if parameters else "",
        strict=function.flag("strict"),
    )


def _read_name(function: Body) -> str:
    name = function.required_text("name")
    if not name:
        raise function.wrong("name", "must not be empty")
    return name


def check_chosen(name: str, tools: Iterable[Tool], param: str) -> str:
    """Return the name of the one tool that is to be called. Raises InvalidParameter where there is no such
    tool."""
    if name not in {tool.name for tool in tools}:
        raise InvalidParameter(param, f"names {name!r}, which is none of the request's functions")
    return name
