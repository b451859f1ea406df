import json

from services.router.parsing.arguments import TypedText, text_of


def typed_arguments(texts, schema):
    typed = TypedText(schema)
    return text_of({name: typed.value(name, text) for name, text in texts.items()})


def test_a_value_is_what_its_schema_says(subtests):
    for text, schema, value in [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3),
        ("3.0", {"type": "integer"}, 3.0),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3", {"type": "string"}, "3"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"type": ["string", "null"]}, "3"),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, ", {"type": "array"}, "[1, "),
        (" 3 ", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("2", {"$ref": "#/$defs/size"}, 2),
        ("2", {"$ref": "#/$defs/word"}, "2"),
        ("2", {"$ref": "#/$defs/loop"}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"const": "2"}, "2"),
        ("3", {}, 3),
        ("three", {}, "three"),
        ("3", True, 3),
        ('"\\ud800"', {}, "\ud800"),
        ("NaN", {"type": "number"}, "NaN"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ]:
        with subtests.test(text[:40], schema=schema):
            root = {
                "properties": {"a": schema},
                "$defs": {
                    "size": {"type": "integer"},
                    "word": {"enum": ["1", "2"]},
                    "loop": {"$ref": "#/$defs/loop"},
                },
            }
            read = typed_arguments({"a": text}, root)
            read.encode()
            assert json.loads(read) == {"a": value}


def test_a_schema_that_says_nothing(subtests):
    for schema in [None, {}, {"properties": []}, [], "x"]:
        with subtests.test(schema=schema):
            assert typed_arguments({"a": "1", "ä": "x y"}, schema) == '{"a": 1, "ä": "x y"}'


def test_schemas_that_are_made_of_themselves_or_very_deep():
    union = {"anyOf": [{"$ref": "#/properties/a"}] * 40}
    deep: dict[str, object] = {"type": "string"}
    for _ in range(900):
        deep = {"allOf": [deep]}
    schema = {"properties": {"a": union, "b": deep, "c": {"type": ["string", {}]}}}
    assert typed_arguments({"a": "1", "b": "x", "c": "1"}, schema) == '{"a": 1, "b": "x", "c": "1"}'
