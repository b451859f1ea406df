"""Constraints drawn at random, each with what says whether a text keeps to it. All such texts are short."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from services.values.request import Constraint, ConstraintKind


@dataclass(frozen=True)
class Drawn:
    constraint: Constraint
    is_kept: Callable[[str], bool]


def _of(kind: ConstraintKind, text: str, is_kept: Callable[[str], bool]) -> Drawn:
    return Drawn(Constraint(kind, (text,)), is_kept)


# -- schemas --------------------------------------------------------------------------------------

Schema = dict[str, Any]
_names = st.sampled_from(["a", "b", "name", "x y", 'quo"te', "größe"])
_scalars = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab ü\n"\\', max_size=4))
_bounds = st.tuples(st.integers(-20, 20), st.integers(0, 120))
_leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}, _bounds),
    st.builds(
        lambda b: {"type": "string", "minLength": b[0], "maxLength": sum(b)},
        st.tuples(st.integers(0, 3), st.integers(0, 5)),
    ),
    st.builds(lambda n: {"type": "string", "pattern": f"^[a-c]{{1,{n}}}-\\d$"}, st.integers(1, 4)),
    st.just({"type": "string", "format": "date"}),
    st.builds(lambda values: {"enum": values}, st.lists(_scalars, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, _scalars),
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def made(properties: dict[str, Schema], optional: set[str]) -> Schema:
        required = [name for name in properties if name not in optional]
        closed = {"required": required, "additionalProperties": False}
        return {"type": "object", "properties": properties, **closed}

    return st.builds(made, st.dictionaries(_names, inner, max_size=3), st.sets(_names, max_size=2))


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def made(items: Schema, least: int, more: int) -> Schema:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(made, inner, st.integers(0, 2), st.integers(0, 2))


schemas = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda one: {"$ref": "#/$defs/one", "$defs": {"one": one}}, _leaves),
    ),
    max_leaves=4,
)


def conforms(value: object, schema: Schema) -> bool:
    """Judge by JSON Schema, as far as these schemas go. True is no 1 in JSON."""
    if "$ref" in schema:
        return conforms(value, schema["$defs"]["one"])
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(one) and value == one for one in allowed)
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and _is_string(value, schema)
        case "array":
            in_bounds = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return in_bounds and all(conforms(one, schema["items"]) for one in value)
    properties = schema["properties"]
    named = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
    return named and all(conforms(one, properties[name]) for name, one in value.items())


def _is_string(value: str, schema: Schema) -> bool:
    if "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    if "format" in schema:
        return re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None
    return schema["minLength"] <= len(value) <= schema["maxLength"]


def _twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def _of_schema(schema: Schema) -> Drawn:
    text = json.dumps(schema, ensure_ascii=False)
    return _of(
        ConstraintKind.JSON_SCHEMA,
        text,
        lambda answer: conforms(json.loads(answer, object_pairs_hook=_twice), schema),
    )


# -- patterns and grammars ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The same language in the words of re and of GBNF."""

    regex: str
    gbnf: str


_literals = st.text('ab-[]"\\/|ü\n{', min_size=1, max_size=3).map(
    lambda text: _Part(re.escape(text), json.dumps(text, ensure_ascii=False))
)
_classes = st.sampled_from([_Part("[a-f]", "[a-f]"), _Part("[0-9]", "[0-9]"), _Part("[^a-z\n]", "[^a-z\\n]")])


def _alternatives(some: list[_Part]) -> _Part:
    return _Part(
        "(?:" + "|".join(one.regex for one in some) + ")", "(" + " | ".join(one.gbnf for one in some) + ")"
    )


def _repeated(part: _Part, least: int, more: int) -> _Part:
    bounds = f"{{{least},{least + more}}}"
    return _Part(f"(?:{part.regex}){bounds}", f"({part.gbnf}){bounds}")


def _sequence(some: list[_Part]) -> _Part:
    return _Part("".join(one.regex for one in some), " ".join(one.gbnf for one in some))


_parts = st.recursive(
    st.one_of(_literals, _classes),
    lambda inner: st.one_of(
        st.builds(_sequence, st.lists(inner, min_size=1, max_size=3)),
        st.builds(_alternatives, st.lists(inner, min_size=1, max_size=3)),
        st.builds(_repeated, inner, st.integers(0, 2), st.integers(1, 2)),
    ),
    max_leaves=5,
)


def _of_pattern(part: _Part) -> Drawn:
    return _of(ConstraintKind.REGEX, part.regex, lambda text: re.fullmatch(part.regex, text) is not None)


def _of_grammar(part: _Part) -> Drawn:
    text = f'root ::= "<" inner ">"\ninner ::= {part.gbnf} | "!"\n'
    whole = re.compile(f"<(?:{part.regex}|!)>")
    return _of(ConstraintKind.GRAMMAR, text, lambda text: whole.fullmatch(text) is not None)


def _of_choice(texts: list[str]) -> Drawn:
    return Drawn(Constraint(ConstraintKind.CHOICE, tuple(texts)), set(texts).__contains__)


drawn_constraints = st.one_of(
    schemas.map(_of_schema),
    _parts.map(_of_pattern),
    _parts.map(_of_grammar),
    st.lists(st.text('ab"\\ü\n', min_size=1, max_size=6), min_size=1, max_size=4).map(_of_choice),
)
