"""A constraint in llguidance's own words: JSON with a schema, or with a grammar in its dialect of Lark.

    json_object   the schema {"type": "object"}
    json_schema   the schema
    regex         start: /.../
    grammar       as it is, or made of GBNF
    choice        start: CHOICE     CHOICE: "..." | "..."    of rules there may be 2,000

JSON has no whitespace between its tokens: where any is allowed, a model that likes none of the words may
write blanks until it is stopped.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.grammar.json_schema import fitted_text
from services.values.constraint import Constraint, ConstraintKind

# What a schema asks that is not supported is an error, whatever the schema's own x-guidance says.
_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False}
# Of all multipleOf together, trailing zeros left out: digits are read with a state for each remainder. One of
# 9,973 takes 0.1 s and 6 MB, one of 999,983 8 s and 350 MB, which no limit of the library's sees.
_MOST_REMAINDERS = 10_000
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(\d[\d.eE+-]{0,30})')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_IS_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*[:\[])", re.MULTILINE)


def lower(constraint: Constraint) -> str:
    """Raises InvalidRequest where that cannot be read; what it means is looked at by whoever compiles it."""
    _check_remainders(constraint)
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_OPTIONS)
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(constraint)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            alternatives = " | ".join(map(json.dumps, dict.fromkeys(constraint.texts)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(lark_of(constraint))


def _check_remainders(constraint: Constraint) -> None:
    """Wherever in its text a schema may be. Raises InvalidRequest."""
    if constraint.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR):
        return
    text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), constraint.text)
    if math.lcm(*map(_significand, set(_MULTIPLE_OF.findall(text)))) > _MOST_REMAINDERS:
        raise constraint.refused(
            f"is not supported: the least common multiple of all multipleOf is above {_MOST_REMAINDERS}"
        )


def _significand(number: str) -> int:
    """Without trailing zeros; 1 for what is none or not above 0, which the library refuses by name."""
    try:
        digits = Decimal(number).normalize().as_tuple().digits
    except ArithmeticError:
        return 1
    return int("".join(map(str, digits))) or 1


def _of_schema(constraint: Constraint) -> str:
    text = fitted_text(constraint)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except ValueError as error:  # nested too deeply, half of a surrogate pair
        raise constraint.refused(f"cannot be read: {error}") from error


def lark_of(constraint: Constraint) -> str:
    """A grammar's text as Lark. Raises InvalidRequest."""
    text = fitted_text(constraint)
    if _IS_LARK.search(text) or "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises bare ones
        problem = " ".join(str(error).split())
        raise constraint.refused(f"cannot be read as GBNF: {problem}") from error
