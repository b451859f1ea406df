"""Schemas are kept to where llguidance does not by itself: numbers, escaped keys, branches of a oneOf.

Real masks decide, over a vocabulary of bytes.
"""

import itertools
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactness.checkpoints import tiny_checkpoint
from grammar.written import ids_of_text
from services.grammar.grammars import Grammars
from services.grammar.json_schema import Apart, fitted
from services.grammar.vocabulary import Vocabulary, read_vocabulary
from services.values.errors import InvalidRequest
from services.values.request import Constraint, ConstraintKind

BIG = 9007199254740993  # 2^53 + 1
A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@cache
def made() -> tuple[Grammars, Vocabulary]:
    directory = tiny_checkpoint(tokenizer="bytes")
    return Grammars(directory, 259), read_vocabulary(directory, 259)


def is_allowed(schema: Any, text: str, in_grammar: bool = False) -> bool:
    wanted = json.dumps(schema)
    kind = ConstraintKind.GRAMMAR if in_grammar else ConstraintKind.JSON_SCHEMA
    constraint = Constraint(kind, (f"start: %json {wanted}" if in_grammar else wanted,))
    grammars, vocabulary = made()
    matcher, ids = grammars.matcher(constraint), ids_of_text(vocabulary, text)
    if matcher.num_fitting(ids) < len(ids):
        return False
    matcher.advance(ids)
    return bool(matcher.inner.is_accepting())


def test_numbers_that_no_double_is_are_refused(subtests):
    for in_grammar in [False, True]:
        with subtests.test("a number that no double is is refused where it counts", in_grammar=in_grammar):
            deep = {"type": "object", "properties": {"id": {"anyOf": [{"const": {"n": [BIG]}}]}}}
            for schema in ({"enum": [1, BIG]}, {"type": "integer", "minimum": BIG}, {"maximum": -BIG}, deep):
                with pytest.raises(
                    InvalidRequest, match=r"has a number at #.*(enum|minimum|maximum|const).*a string"
                ):
                    is_allowed(schema, "1", in_grammar)
            with pytest.raises(InvalidRequest, match="has a number"):
                wanted = '{"const": 0.12345678901234567890}'
                made()[0].check(Constraint(ConstraintKind.JSON_SCHEMA, (wanted,)))
            assert is_allowed({"const": 2**60}, str(2**60), in_grammar)
            assert is_allowed({"type": "integer", "default": BIG}, "5", in_grammar)
            named = {"type": "object", "properties": {"const": {"type": "integer", "examples": [BIG]}}}
            assert is_allowed(named, '{"const":5}', in_grammar)
    with subtests.test("a number with an exponent beyond all numbers is refused"):
        for number in ("1e99999999999999999999999", "1e-99999999999999999999999", "1e400"):
            for kind, text in (
                (ConstraintKind.JSON_SCHEMA, "{}"),
                (ConstraintKind.GRAMMAR, "start: %json {}"),
            ):
                wanted = text.replace("{}", '{"const": NUMBER}').replace("NUMBER", number)
                with pytest.raises(InvalidRequest, match="has a number at #/const"):
                    made()[0].check(Constraint(kind, (wanted,)))


def test_declared_keys_come_once(subtests):
    for in_grammar in [False, True]:
        with subtests.test("a declared key comes once however it is written", in_grammar=in_grammar):
            for schema in (A, A | {"additionalProperties": {}}, {"$ref": "#/$defs/x", "$defs": {"x": A}}):
                assert not is_allowed(schema, '{"a":1,"\\u0061":"x"}', in_grammar)
                assert not is_allowed(schema, '{"\\u0061":"x"}', in_grammar)
                for text in ('{"a":1}', '{"a":1,"b":"x"}', '{"":[],"x\\ny":2}', '{"a":1,"\\"é":{}}', "{}"):
                    assert is_allowed(schema, text, in_grammar), text
            closed = A | {"additionalProperties": False}
            assert is_allowed(closed, '{"a":1}') and not is_allowed(closed, '{"a":1,"b":1}')
            nested = {"type": "array", "items": A}
            assert not is_allowed(nested, '[{"a":1,"\\u0061":"x"}]', in_grammar)
    with subtests.test("keys of schemas that are put together are those of each"):
        b = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
        assert is_allowed({"allOf": [A, b]}, '{"a":1,"b":"x","c":[]}')
        for text in ('{"a":1}', '{"a":"x","b":"x"}', '{"a":1,"b":2}', '{"b":"x","\\u0061":1}'):
            assert not is_allowed({"allOf": [A, b]}, text), text
        either = A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
        assert is_allowed(either, '{"a":1}') and is_allowed(either, '{"b":"x"}')
        assert not is_allowed(either, '{"c":1}')
    with subtests.test("keys that may come twice are not counted on"):
        assert is_allowed({"type": "object", "minProperties": 1}, '{"b":1}')
        required = A | {"required": ["a"], "minProperties": 2}
        assert is_allowed(required, '{"a":1,"b":1}') and not is_allowed(required, '{"a":1}')
        with pytest.raises(InvalidRequest, match="asks at # for minProperties 2"):
            is_allowed({"type": "object", "minProperties": 2}, "{}")


ALL_OR_NUMBER = {"oneOf": [{"enum": ["all"]}, {"type": "string", "pattern": "^[1-9][0-9]*$"}]}
KINDS = {
    "oneOf": [
        {"$ref": "#/$defs/dot"},
        {
            "properties": {"kind": {"enum": ["line", "arrow"]}, "to": {"type": "integer"}},
            "required": ["kind"],
        },
    ],
    "type": "object",
    "$defs": {
        "dot": {"type": "object", "properties": {"kind": {"const": "dot"}}, "required": ["kind"]},
    },
}


def test_branches_that_cannot_both_hold_work(subtests):
    for schema, allowed, wrong in [
        (ALL_OR_NUMBER, ['"all"', '"17"'], ['"any"', '"07"']),
        (KINDS, ['{"kind":"dot"}', '{"kind":"arrow","to":3}'], ['{"kind":"square"}', '{"to":3}']),
        (
            {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]},
            ["2", "6"],
            ["4"],
        ),
        ({"type": "string", "oneOf": [{"maxLength": 2}, {"minLength": 4}]}, ['"ab"', '"abcd"'], ['"abc"']),
        ({"oneOf": [{"type": "null"}, {"type": ["string", "boolean"]}]}, ["null", '""', "true"], ["1"]),
        (
            {
                "oneOf": [
                    A | {"required": ["a"]},
                    {"type": "object", "properties": {}, "additionalProperties": False},
                ]
            },
            ['{"a":1}', "{}"],
            ['{"b":1}'],
        ),
    ]:
        with subtests.test(schema=schema):
            assert [text for text in allowed if not is_allowed(schema, text)] == []
            assert [text for text in wrong if is_allowed(schema, text)] == []


def test_branches_that_may_both_hold_are_refused_in_words_of_the_schema() -> None:
    overlapping = [
        [{"type": "string"}, {"type": "string", "minLength": 5}],
        [{"enum": ["all", "1"]}, {"type": "string", "pattern": "^[1-9]"}],
        [A, {"type": "object", "properties": {"a": {"type": "string"}}}],  # neither requires it
        [{"type": "integer", "maximum": 5}, {"type": "number", "minimum": 5}],
    ]
    for branches in overlapping:
        with pytest.raises(InvalidRequest, match="several branches of a oneOf") as refused:
            is_allowed({"oneOf": branches}, "1")
        assert "coerce" not in str(refused.value)


def test_schemas_that_are_made_to_be_long_work_are_answered(subtests):
    with subtests.test("a pattern that backs up is not tried"):
        # It would hold the interpreter for hours; that the branches are apart is then not found out.
        text = "a" * 40 + "b"
        for pattern in (
            "^(a+)+$",
            "^(a|aa)+$",
            "a*a*a*a*a*$",
            "^(?:a?){40}a{40}$",
            "a{99999999999999999999}",
        ):
            branches = [{"const": text}, {"type": "string", "pattern": pattern}]
            assert "oneOf" in fitted({"oneOf": branches}), pattern
        for pattern in ("^b", "^[1-9][0-9]*$", r"^\d+$", "^.b", "c"):
            branches = [{"const": text}, {"type": "string", "pattern": pattern}]
            assert "anyOf" in fitted({"oneOf": branches}), pattern
    with subtests.test("a schema that is made to be long work is answered"):
        listed = {"oneOf": [{"enum": [*range(3000)]}, {"enum": [*range(10_000, 16_000)]}]}
        assert "oneOf" in fitted(listed)  # more values than are compared
        loop = {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 50}}}
        many = {"oneOf": [{"anyOf": [{"minLength": n}] * 60} for n in range(60)]}
        assert fitted({"oneOf": [loop, loop], **loop}) is not None
        assert "oneOf" in fitted(many)
        assert fitted({"$ref": "#"}) == {"$ref": "#"}


# -- a dumb oracle: a validator that knows the same keywords, over all small values --------------------

SCALARS = [None, True, False, 0, 1, 2, 1.5, "", "a", "b", "ab"]
VALUES = [
    *SCALARS,
    *([*each] for length in (0, 1, 2) for each in itertools.product([0, "a"], repeat=length)),
    *({"p": each} for each in [0, 1, "a", "b", None]),
    *({"p": each, "q": 1} for each in [0, "a"]),
    {},
    {"q": 1},
]
TYPES = {
    "null": type(None),
    "boolean": bool,
    "string": str,
    "array": list,
    "object": dict,
    "number": (int, float),
    "integer": int,
}


def is_valid(value: Any, schema: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = {
        "type": lambda name: (
            isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        ),
        "const": lambda other: json.dumps(value) == json.dumps(other),
        "enum": lambda others: json.dumps(value) in map(json.dumps, others),
        "minimum": lambda low: not number or value >= low,
        "exclusiveMaximum": lambda high: not number or value < high,
        "minLength": lambda low: not isinstance(value, str) or len(value) >= low,
        "maxLength": lambda high: not isinstance(value, str) or len(value) <= high,
        "minItems": lambda low: not isinstance(value, list) or len(value) >= low,
        "maxItems": lambda high: not isinstance(value, list) or len(value) <= high,
        "required": lambda names: not isinstance(value, dict) or set(names) <= value.keys(),
        "properties": lambda each: (
            not isinstance(value, dict)
            or all(is_valid(value[name], each[name]) for name in value.keys() & each)
        ),
        "additionalProperties": lambda _: (
            not isinstance(value, dict) or value.keys() <= schema.get("properties", {}).keys()
        ),
        "anyOf": lambda parts: any(is_valid(value, part) for part in parts),
        "oneOf": lambda parts: sum(is_valid(value, part) for part in parts) == 1,
        "allOf": lambda parts: all(is_valid(value, part) for part in parts),
        "pattern": lambda pattern: not isinstance(value, str) or value.startswith(pattern[1:]),
    }
    return all(checks[key](said) for key, said in schema.items())


small = st.integers(0, 2)
plain = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([*TYPES]),
        "const": st.sampled_from(SCALARS),
        "enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=2),
        "minimum": small,
        "exclusiveMaximum": small,
        "minLength": small,
        "maxLength": small,
        "minItems": small,
        "maxItems": small,
        "pattern": st.sampled_from(["^a", "^b"]),
    },
)
schemas = st.recursive(
    plain | st.booleans(),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "string"]),
            "required": st.lists(st.sampled_from("pq"), max_size=2, unique=True),
            "properties": st.dictionaries(st.sampled_from("pq"), inner, max_size=2),
            "additionalProperties": st.just(False),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=5,
)


@given(schemas, schemas)
def test_what_is_said_to_be_apart_has_no_value_in_common(one: Any, other: Any) -> None:
    if Apart({}).are(one, other):
        assert [value for value in VALUES if is_valid(value, one) and is_valid(value, other)] == []


@given(schemas)
def test_a_schema_means_the_same_to_an_oracle_without_its_one_ofs(schema: Any) -> None:
    wanted = {"oneOf": [schema, {"type": "null"}]}
    meant = fitted(wanted)
    if "anyOf" in meant:
        assert [v for v in VALUES if is_valid(v, wanted) != is_valid(v, {"anyOf": wanted["oneOf"]})] == []
