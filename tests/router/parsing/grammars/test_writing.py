"""Grammars of calls, where a real tokenizer's masks are not needed to see what is wrong."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.router.parsing.grammars.lark import Lark
from services.router.parsing.grammars.obligation import HarmonyWriting, MarkedWriting, Obligation
from services.router.parsing.grammars.writing import WRITINGS

SPECIAL = {"<x>": 7, "<tool_call>": 8, "[TOOL_CALLS]": 9}
TAGGED = ("qwen3_coder", "glm45", "minimax_m2")


def grammar_of(name, schema):
    asked = Obligation(Lark(SPECIAL), {"f": schema})
    writing = HarmonyWriting() if name == "harmony" else MarkedWriting(None, WRITINGS[name])
    return writing.must_call(asked)


@pytest.mark.parametrize("name", [*WRITINGS, "harmony"])
def test_what_the_client_says_is_no_special_token(name):
    schema = {"properties": {"<x>": {"enum": ["<x>", "b"]}, "c": {"const": "<x>"}}, "required": ["c"]}
    grammar = grammar_of(name, schema)
    assert "<[7]>" not in grammar and '"<x>"' in grammar


def test_markers_are_special_tokens_where_they_are():
    assert grammar_of("hermes", {}).startswith("start: ") and "<[8]>" in grammar_of("hermes", {})
    assert "<[9]>" in grammar_of("mistral", {})
    assert '"<minimax:tool_call>"' in grammar_of("minimax_m2", {})


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"type": "string"}, True),
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, True),
        ({"$ref": "#/$defs/word"}, True),
        ({"type": "integer"}, False),
        ({"$ref": "#/$defs/count"}, False),
        ({"$ref": "#/$defs/none"}, False),
        ({"enum": [1, "a"]}, False),
        (True, False),
    ],
)
def test_strings_stand_between_tags_as_they_are(name, schema, is_text):
    root = {"properties": {"a": schema}, "$defs": {"word": {"type": "string"}, "count": {"type": "integer"}}}
    assert ("%json" not in grammar_of(name, root)) == is_text


BYTES = LLTokenizer("byte")


def accepts(grammar, text):
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_string_ends_where_its_tag_does():
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    begin = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n"
    end = "\n</parameter>\n</function>\n</tool_call>"
    asked = Obligation(Lark({}), {"f": schema})
    grammar = MarkedWriting(None, WRITINGS["qwen3_coder"]).must_call(asked)
    assert accepts(grammar, f"{begin}3{end}")
    assert not accepts(grammar, f"{begin}three{end}")
