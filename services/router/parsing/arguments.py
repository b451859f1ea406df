"""Arguments that were written as plain text, as their tool's JSON schema has them. Pure.

    <parameter=days>3</parameter>      {"days": {"type": "integer"}}  -> 3      {"type": "string"} -> "3"

What the schema leaves open is JSON where it reads as JSON: templates write strings alone without quotes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from services.router.parsing.json_text import text_of, value_of
from services.router.parsing.reader import Unreadable

_MAX_REFERENCES = 8
_WORDS = {"true": True, "false": False, "none": None, "null": None}  # as Python writes them, too


def typed_arguments(texts: Mapping[str, str], schema: Any) -> str:
    """The JSON object of those texts; `schema` is of the object."""
    properties = _member(schema, "properties")
    return text_of({name: _typed(text, _member(properties, name), schema) for name, text in texts.items()})


def _typed(text: str, schema: Any, root: Any) -> Any:
    types = set(_types(schema, root, _MAX_REFERENCES))
    if types == {"string"}:
        return text
    try:
        value = _value(text.strip())
    except Unreadable:
        return text
    return value if not types or not types.isdisjoint(_names(value)) else text


def _value(text: str) -> Any:
    lowered = text.lower()
    return _WORDS[lowered] if lowered in _WORDS else value_of(text)


def _names(value: Any) -> tuple[str, ...]:
    """Of the types that it has in JSON schema."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number", "integer") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)


def _types(schema: Any, root: Any, references: int) -> Iterator[str]:
    declared = _member(schema, "type")
    yield from [declared] if isinstance(declared, str) else _list(declared)
    values = [*_list(_member(schema, "enum")), *([schema["const"]] if _has(schema, "const") else [])]
    if declared is None:
        for value in values:
            yield _names(value)[0]
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in _list(_member(schema, union)):
            yield from _types(choice, root, references)
    reference = _member(schema, "$ref")
    if isinstance(reference, str) and references:
        yield from _types(_referred(reference, root), root, references - 1)


def _referred(reference: str, root: Any) -> Any:
    schema = root
    for name in reference.removeprefix("#/").split("/"):
        schema = _member(schema, name)
    return schema


def _member(schema: Any, name: str) -> Any:
    return schema.get(name) if isinstance(schema, dict) else None


def _has(schema: Any, name: str) -> bool:
    return isinstance(schema, dict) and name in schema


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
