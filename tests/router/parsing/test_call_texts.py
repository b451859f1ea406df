"""Calls that are written as text are read as the calls that they were."""

import pytest

from services.router.parsing.call_texts import CALL_TEXTS
from services.router.parsing.choice import choose
from services.router.parsing.formats import CALL_FORMATS
from services.router.parsing.piece import Call

CALLS = [Call("look_up", '{"what": "the café\'s \\"ß\\"", "limit": 3}'), Call("g2", "{}")]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "g2", "arguments": {}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "g2", "arguments": {}}]',
    "tool_calls": '<tool_calls>[{"name": "g2", "arguments": {}}]</tool_calls>',
    "phi4_mini": 'functools[{"name": "g2", "arguments": {}}]',
    "nemotron_nano_v2": '<TOOLCALL>[{"name": "g2", "arguments": {}}]</TOOLCALL>',
    "lfm2": "<|tool_call_start|>[g2()]<|tool_call_end|>",
}


def test_calls_are_written_as_their_format_reads_them(subtests: pytest.Subtests) -> None:
    for name in CALL_TEXTS:
        with subtests.test(name):
            assert CALL_TEXTS[name](CALLS[1:]) == WRITTEN[name]
            if name in CALL_FORMATS:
                parser = choose(name, "none", "", None).parser({"look_up": {}, "g2": {}}, "")
                assert parser is not None
                pieces = [parser.feed(CALL_TEXTS[name](CALLS)), parser.finish()]
                called = [(call.name, call.arguments) for piece in pieces for call in piece.calls]
                assert [name for name, _ in called] == ["look_up", "g2"]
                assert all(not piece.content for piece in pieces)


def test_values_are_pythons_where_the_call_is() -> None:
    [call] = [Call("f", '{"a": true, "b": null, "c": [1.5], "d": "it\'s"}')]
    written = '<|tool_call_start|>[f(a=True, b=None, c=[1.5], d="it\'s")]<|tool_call_end|>'
    assert CALL_TEXTS["lfm2"]([call]) == written
