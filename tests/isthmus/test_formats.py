"""These tests show what an answer must be, and what it is then."""

import json

from isthmus.formats import format_of

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


class City:
    """As pydantic's models are."""

    @classmethod
    def model_json_schema(cls):
        return SCHEMA

    @classmethod
    def model_validate_json(cls, text):
        city = cls()
        city.age = json.loads(text)["age"]
        return city


def test_a_format_is_a_constraint_and_how_its_answer_is_read(subtests):
    for given in [SCHEMA, json.dumps(SCHEMA), City]:
        with subtests.test(given=given):
            wanted = format_of({"json_schema": given})
            assert json.loads(wanted.constraint.json_schema) == SCHEMA
            parsed = wanted.parse('{"age": 3}')
            assert parsed.age == 3 if given is City else parsed == {"age": 3}
    with subtests.test("other formats"):
        assert format_of({}) is format_of({"json_object": False, "regex": None}) is None
        anything = format_of({"json_object": True})
        assert anything.constraint.json_object and anything.parse('{"a": 1}') == {"a": 1}
        for name, value in {"regex": "a+", "grammar": 'start: "a"'}.items():
            wanted = format_of({name: value})
            assert getattr(wanted.constraint, name) == value and wanted.parse is None
        assert list(format_of({"choice": ["yes", "no"]}).constraint.choice.texts) == ["yes", "no"]
