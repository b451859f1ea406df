"""A constraint is put into llguidance's words: JSON with a schema, or a grammar in its dialect of Lark.

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

# A schema that asks what is not supported is refused, whatever its own x-guidance says.
_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False}
# The limit is for all multipleOf together, trailing zeros left out: digits are read with a state for each
# remainder. One of 9,973 takes 0.1 s and 6 MB, one of 999,983 8 s and 350 MB, which no limit of the library's
# sees.
_MOST_REMAINDERS = 10_000
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(\d[\d.eE+-]{0,30})')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_IS_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*[:\[])", re.MULTILINE)


def lower(constraint: Constraint) -> str:
    """Return the constraint in these words; whoever compiles it looks at what it means.

    Raises InvalidRequest where it cannot be read.
    """
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
    if constraint.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR):
        return
    text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), constraint.text)
    if math.lcm(*map(_significand, set(_MULTIPLE_OF.findall(text)))) > _MOST_REMAINDERS:
        raise constraint.refused(
            f"is not supported: the least common multiple of all multipleOf is above {_MOST_REMAINDERS}"
        )


def _significand(number: str) -> int:
    """Return the number without trailing zeros.

    What is no number above 0 gives 1: the library refuses it by name.
    """
    try:
        digits = Decimal(number).normalize().as_tuple().digits
    except ArithmeticError:
        return 1
    return int("".join(map(str, digits))) or 1


def _of_schema(constraint: Constraint) -> str:
    text = fitted_text(constraint)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except ValueError as error:  # the text is nested too deeply, or has half of a surrogate pair
        raise constraint.refused(f"cannot be read: {error}") from error


def lark_of(constraint: Constraint) -> str:
    text = fitted_text(constraint)
    if _IS_LARK.search(text) or "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare exceptions
        problem = " ".join(str(error).split())
        raise constraint.refused(f"cannot be read as GBNF: {problem}") from error
