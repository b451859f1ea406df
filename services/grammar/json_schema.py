"""A JSON schema is rewritten so that llguidance 1.9 enforces all of it, or refused where it would not.

- Numbers of const, enum and bounds become doubles there: 2^53 + 1 would be answered as 2^53.
- Other keys than the declared ones may be written with an escape, and so repeat a declared one. Keys that a
  pattern allows may not, so "any other key" becomes a pattern.
- oneOf becomes anyOf where no value is valid in two branches, which llguidance itself finds in few cases.

All of this was found by experiment (findings/); tests/grammar/test_json_schema.py tests it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

from services.values.request import Constraint, ConstraintKind

Schema = Any  # A schema is an object, or true or false.

_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties", "not", "if", "then", "else"})
_VALUES = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_JSON_IN_LARK = re.compile(r"%json\s*\{")
_ANY_KEY = r"^[\s\S]*$"

# The pattern may have characters, classes and escapes, each perhaps repeated. Without groups, backtracking is
# limited to a power of the text's length, whose exponent is the number of repeats.
_QUICK = re.compile(
    r"\^?(?:(?:[^\\^$.|?*+()\[\]{}]|\\[dwsDWS.\\/-]|\.|\[\^?[^\[\]\\]+\])(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})?)*\$?"
)
_REPEATS = re.compile(r"[*+?{]")
_MOST_REPEATS = 2
_MOST_MATCHED_CHARS = 100

_NUMBERS = frozenset({"integer", "fraction"})
_TYPES = frozenset({"null", "boolean", "string", "array", "object"}) | _NUMBERS
_MOST_BRANCHES = 64
# At most so many schemas are compared for one schema, as this runs in a router's thread.
_MOST_COMPARISONS = 10_000
_MOST_NESTED = 40


class Unsupported(ValueError):
    pass


class _Inexact(float):
    pass


def _integer(text: str) -> int | float:
    number = int(text)
    is_exact = abs(number) < 1 << 1023 and int(float(number)) == number
    return number if is_exact else _Inexact(text)


def _fraction(text: str) -> float:
    number = float(text)
    try:
        is_exact = Decimal(text) == Decimal(repr(number))
    except ArithmeticError:  # Decimals do not support every exponent.
        is_exact = False
    return number if is_exact else _Inexact(text)


# It raises ValueError and RecursionError where a text is not JSON.
_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_fraction)


def fitted(schema: Schema) -> Schema:
    return _Fitting(schema).fitted(schema, "#")


def fitted_text(constraint: Constraint) -> str:
    """Rewrite the text of a JSON schema, or the schemas in a grammar (`%json {...}`).

    Raises InvalidRequest.
    """
    if constraint.kind is ConstraintKind.GRAMMAR:
        return _with_schemas_fitted(constraint)
    try:
        schema = _DECODER.decode(constraint.text)
    except (ValueError, RecursionError) as error:
        raise constraint.refused(f"is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise constraint.refused("must be a JSON object")
    meant = _fitted_of(constraint, schema if schema is not True else {})
    return constraint.text if meant == schema else json.dumps(meant)


def _with_schemas_fitted(constraint: Constraint) -> str:
    text, pieces, end = constraint.text, list[str](), 0
    for found in _JSON_IN_LARK.finditer(text):
        if found.start() < end:
            continue
        try:
            schema, behind = _DECODER.raw_decode(text, found.end() - 1)
        except (ValueError, RecursionError):
            continue  # llguidance reports what is wrong with it, and where.
        meant = _fitted_of(constraint, schema)
        if meant != schema:
            pieces += text[end : found.end() - 1], json.dumps(meant)
            end = behind
    return "".join((*pieces, text[end:]))


def _fitted_of(constraint: Constraint, schema: Schema) -> Schema:
    try:
        return fitted(schema)
    except Unsupported as error:
        raise constraint.refused(str(error)) from error
    except RecursionError as error:
        raise constraint.refused("cannot be read: it is nested too deeply") from error


class _Fitting:
    def __init__(self, root: Schema) -> None:
        self._apart = Apart(root)

    def fitted(self, schema: Schema, where: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        inner = {key: self._member(key, value, f"{where}/{key}") for key, value in schema.items()}
        _check_count(inner, where)
        return _with_keys_as_written(self._without_one_of(inner))

    def _member(self, key: str, value: Any, where: str) -> Any:
        if key in _VALUES:
            _check_exact(value, where)
        if isinstance(value, dict):
            if key in _SCHEMA_MAPS:
                return {name: self.fitted(each, f"{where}/{name}") for name, each in value.items()}
            return self.fitted(value, where) if key in _SCHEMAS else value
        if isinstance(value, list) and key in _SCHEMA_LISTS:
            return [self.fitted(each, f"{where}/{place}") for place, each in enumerate(value)]
        return value

    def _without_one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        branches = schema.get("oneOf")
        if "anyOf" in schema or not isinstance(branches, list) or len(branches) > _MOST_BRANCHES:
            return schema
        of_all = {"type": schema["type"]} if "type" in schema else {}
        typed = [of_all | branch if isinstance(branch, dict) else branch for branch in branches]
        if not all(self._apart.are(one, other) for one, other in combinations(typed, 2)):
            return schema
        return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}


def _check_exact(value: Any, where: str) -> None:
    if isinstance(value, _Inexact):
        raise Unsupported(f"has a number at {where} that a double does not hold; write it as a string")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        _check_exact(each, where)


def _check_count(schema: Mapping[str, Any], where: str) -> None:
    """Refuse counts of keys: a key that is not declared may occur twice, and would be counted twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(filter(_is_text, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise Unsupported(f"asks at {where} for minProperties {least}: it may be at most one above required")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _with_keys_as_written(schema: dict[str, Any]) -> dict[str, Any]:
    others = schema.get("additionalProperties", True)
    is_open = others is True or others == {}
    if not (is_open and schema.get("properties")) or "patternProperties" in schema:
        return schema
    return schema | {"patternProperties": {_ANY_KEY: {}}, "additionalProperties": False}


class Apart:
    """This finds out whether no value is valid in both of two schemas.

    The answer is False where that is not certain.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _MOST_COMPARISONS

    def are(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        self._left -= 1
        if self._left < 0 or depth > _MOST_NESTED:
            return False
        one, other = self._looked_up(one), self._looked_up(other)
        if one is False or other is False:
            return True
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        if self._by_parts(one, other, depth + 1) or self._by_parts(other, one, depth + 1):
            return True
        types = _types_of(one) & _types_of(other)
        return all(self._by_type(each, one, other, depth + 1) for each in types)

    def _looked_up(self, schema: Schema) -> Schema:
        """Follow a reference, without the keywords beside it: they only make fewer values valid."""
        for _ in range(_MOST_NESTED):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str):
                return schema
            schema = _at(self._root, reference)
        return True

    def _by_parts(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        if any(self.are(each, other, depth) for each in _list_of(one, "allOf")):
            return True
        for name in ("anyOf", "oneOf"):
            parts = _list_of(one, name)
            if parts and all(self.are(each, other, depth) for each in parts):
                return True
        values = [one["const"]] if "const" in one else _list_of(one, "enum")
        return bool(values) and all(self._is_invalid(value, other, depth) for value in values)

    def _is_invalid(self, value: Any, schema: Schema, depth: int) -> bool:
        """Check only the keywords that are known here; a schema may have others."""
        self._left -= 1
        schema = self._looked_up(schema)
        if not isinstance(schema, dict) or self._left < 0 or depth > _MOST_NESTED:
            return schema is False
        if _type_of(value) not in _types_of(schema):
            return True
        if any(self._is_invalid(value, each, depth + 1) for each in _list_of(schema, "allOf")):
            return True
        parts = _list_of(schema, "anyOf")
        if parts and all(self._is_invalid(value, each, depth + 1) for each in parts):
            return True
        allowed = [schema["const"]] if "const" in schema else _list_of(schema, "enum")
        self._left -= len(allowed)
        if allowed and self._left >= 0 and not any(_is_same(value, each) for each in allowed):
            return True
        return self._is_wrong(value, schema, depth)

    def _is_wrong(self, value: Any, schema: dict[str, Any], depth: int) -> bool:
        match value:
            case bool() | None:
                return False
            case str():
                return _is_outside(len(value), schema, _LENGTHS) or not _may_match(value, schema)
            case int() | float():
                return _is_outside(value, schema, _BOUNDS)
            case list():
                return _is_outside(len(value), schema, _COUNTS)
        if not set(filter(_is_text, _list_of(schema, "required"))) <= value.keys():
            return True
        each = _properties_of(schema)
        return any(self._is_invalid(value[name], each[name], depth + 1) for name in value.keys() & each)

    def _by_type(self, kind: str, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        match kind:
            case "string":
                return _have_a_gap(one, other, _LENGTHS)
            case "integer" | "fraction":
                return _have_a_gap(one, other, _BOUNDS)
            case "array":
                return _have_a_gap(one, other, _COUNTS)
            case "object":
                return self._by_property(one, other, depth) or self._by_property(other, one, depth)
        return False

    def _by_property(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        mine, theirs = _properties_of(one), _properties_of(other)
        is_closed = other.get("additionalProperties") is False and "patternProperties" not in other
        for name in filter(_is_text, _list_of(one, "required")):
            self._left -= 1
            if name in theirs and name in mine and self.are(mine[name], theirs[name], depth):
                return True
            if name not in theirs and is_closed:
                return True
        return False


def _at(root: Schema, reference: str) -> Schema:
    if reference != "#" and not reference.startswith("#/"):
        return True
    place = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, dict) or name not in place:
            return True
        place = place[name]
    return place


def _list_of(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else ()


def _properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    value = schema.get("properties")
    return value if isinstance(value, dict) else {}


def _types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("type")
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list) or not all(name == "number" or name in _TYPES for name in listed):
        return _TYPES
    return frozenset(kind for name in listed for kind in (_NUMBERS if name == "number" else (name,)))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case list():
            return "array"
    return "object"


def _is_same(one: Any, other: Any) -> bool:
    """Compare as JSON Schema does: 1 is 1.0, but true is not 1."""
    if _type_of(one) != _type_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _may_match(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether the text may match the schema's pattern.

    A pattern is only tried if Python's engine cannot take long, on a short ASCII text of one line, where it
    means the same as in llguidance.
    """
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not _QUICK.fullmatch(pattern):
        return True
    is_short = len(text) <= _MOST_MATCHED_CHARS and text.isascii() and "\n" not in text
    if not is_short or len(_REPEATS.findall(pattern)) > _MOST_REPEATS:
        return True
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError):
        return True


# These keywords state a quantity's minimum, maximum, and its exclusive minimum and maximum.
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength", "", "")
_COUNTS = ("minItems", "maxItems", "", "")


def _bounds_of(schemas: Iterable[Mapping[str, Any]], names: Sequence[str]) -> tuple[float, bool, float, bool]:
    """Return the greatest lower bound and the least upper bound, each with whether it is exclusive."""
    low, high = (float("-inf"), False), (float("inf"), True)
    for schema in schemas:
        for place, name in enumerate(names):
            value = schema.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if place % 2 == 0:
                low = max(low, (value, place == 2))
            else:
                high = min(high, (value, place == 1))
    return *low, high[0], not high[1]


def _have_a_gap(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> bool:
    low, is_above, high, is_below = _bounds_of((one, other), names)
    return low > high or (low == high and (is_above or is_below))


def _is_outside(value: float, schema: Mapping[str, Any], names: Sequence[str]) -> bool:
    only = {names[0]: value, names[1]: value}
    return _have_a_gap(only, schema, names)
