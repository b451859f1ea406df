"""Arguments in plain text become values of the types in their tool's JSON schema. The module is pure.

    <parameter=days>3</parameter>      {"days": {"type": "integer"}}  -> 3      {"type": "string"} -> "3"

Where the schema states no type, the text is read as JSON if it can be, as templates leave out only the quotes
of strings.

A model's JSON is checked, and kept as text.
"""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from services.router.parsing.reader import Unreadable


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_BLANKS = " \t\r\n"


def value_of(source: str) -> Any:
    try:
        return _DECODER.decode(source)
    except (ValueError, RecursionError) as error:
        raise Unreadable from error


def text_of(value: Any) -> str:
    """Return JSON, with escapes only where it holds half of a surrogate pair, which is not text."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def members_of(source: str) -> dict[str, str]:
    """Return the text of each member of an object, by name. Raises Unreadable for anything else."""
    if not isinstance(value_of(source), dict):
        raise Unreadable
    members, at = {}, _behind_blanks(source, source.index("{") + 1)
    while source[at] != "}":
        name, at = _DECODER.raw_decode(source, at)
        begin = _behind_blanks(source, _behind_blanks(source, at) + 1)  # The value begins after the colon.
        _, end = _DECODER.raw_decode(source, begin)
        members[name] = source[begin:end]
        at = _behind_blanks(source, end)
        at = _behind_blanks(source, at + 1) if source[at] == "," else at
    return members


def _behind_blanks(source: str, at: int) -> int:
    while source[at] in _BLANKS:
        at += 1
    return at


def arguments_of(source: str) -> str:
    """Return an object's text. Nothing and null become {}, and a string that holds an object becomes that
    object, as some models encode their arguments twice. Raises Unreadable for anything else."""
    source = source.strip(_BLANKS)
    if source in ("", "null", '""'):
        return "{}"
    value = value_of(source)
    if isinstance(value, str):
        source, value = value, value_of(value)
    if not isinstance(value, dict) or not is_text(source):
        raise Unreadable
    return source


_WORDS = {"true": True, "false": False, "none": None, "null": None}  # Python writes some of them in this way.


class TypedText:
    """`schema` is that of the object of all arguments, or of an object within `root`."""

    def __init__(self, schema: Any, root: Any = None) -> None:
        self._schema = schema
        self._root = schema if root is None else root

    def may_have(self, name: str) -> bool:
        properties = _member(self._schema, "properties")
        return not properties or _has(properties, name)

    def is_string(self, name: str) -> bool:
        return self._types(name) == {"string"}

    def takes_text(self, name: str) -> bool:
        types = self._types(name)
        return not types or "string" in types

    def value(self, name: str, text: str) -> Any:
        types = self._types(name)
        if types == {"string"}:
            return text
        try:
            value = _value(text.strip())
        except Unreadable:
            return text
        return value if not types or not types.isdisjoint(_names(value)) else text

    def _types(self, name: str) -> set[str]:
        return _types(self._of(name), self._root)

    def _of(self, name: str) -> Any:
        return _member(_member(self._schema, "properties"), name)

    def is_known(self, name: str) -> bool:
        return bool(self._types(name))

    def is_list(self, name: str) -> bool:
        return "array" in self._types(name)

    def empty(self, name: str) -> Any:
        types = self._types(name)
        return [] if "array" in types else {} if "object" in types else None

    def within(self, name: str) -> dict[str, Any]:
        """Return the first of the value's alternative schemas that describes its members."""
        schemas = _made_of(self._of(name), self._root)
        described = (each for each in schemas if _has(each, "properties") or _has(each, "items"))
        return next(described, {})


def _value(text: str) -> Any:
    lowered = text.lower()
    return _WORDS[lowered] if lowered in _WORDS else value_of(text)


def _names(value: Any) -> tuple[str, ...]:
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


def _types(schema: Any, root: Any) -> set[str]:
    return {name for each in _made_of(schema, root) for name in _own_types(each)}


def _made_of(schema: Any, root: Any) -> list[Any]:
    """Return the schema and those that it consists of, each once, as it may be recursive."""
    found, seen = [schema], {id(schema)}
    for looked_at in found:  # The list grows in this loop.
        for part in _parts(looked_at, root):
            if id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return found


def _own_types(schema: Any) -> Iterator[str]:
    declared = _member(schema, "type")
    if isinstance(declared, str):
        yield declared
    else:
        yield from (each for each in _list(declared) if isinstance(each, str))
    if declared is None:
        constants = [schema["const"]] if _has(schema, "const") else []
        for value in [*_list(_member(schema, "enum")), *constants]:
            yield _names(value)[0]


def _parts(schema: Any, root: Any) -> Iterator[Any]:
    for union in ("anyOf", "oneOf", "allOf"):
        yield from _list(_member(schema, union))
    reference = _member(schema, "$ref")
    if isinstance(reference, str):
        yield _referred(reference, root)


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
