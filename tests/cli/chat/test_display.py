"""These tests show what is seen of an answer."""

import io

import pytest

from cli.chat.turns import answered, finish
from services.cli.chat_terminal import Plain, Terminal, visible
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import ToolCallDelta

pytestmark = pytest.mark.long

PIECES = (
    {"reasoning": "Let me "},
    {"reasoning": "see.", "token_ids": [1]},
    {"text": "It is ", "token_ids": [2]},
    {"text": "warm."},
    {"tool_calls": [ToolCallDelta(index=0, name="add", arguments='{"a": ')], "token_ids": [3]},
    {"tool_calls": [ToolCallDelta(index=0, arguments="1}"), ToolCallDelta(index=1, name="sub")]},
    {"finish": finish()},
)


def shown(display):
    for fields in PIECES:
        display.piece(generation_pb2.GenerateResponse(**fields))
    display.end(answered(*PIECES))


def test_what_is_shown_of_an_answer(subtests, capsys):
    with subtests.test("thinking the answer and calls stand apart"):
        stream = io.StringIO()
        shown(Terminal(stream, "never"))
        assert stream.getvalue().splitlines()[:5] == [
            *("Let me see.", "", "It is warm.", 'calls add {"a": 1}', "calls sub "),
        ]
        assert "192 of 255 found" in stream.getvalue()
    with subtests.test("thinking is dim"):
        stream = io.StringIO()
        shown(Terminal(stream, "always"))
        assert "\x1b[2;3mLet me \x1b[0m" in stream.getvalue() and "\x1b[2;3mIt is" not in stream.getvalue()
    with subtests.test("piped the answer comes alone"):
        shown(Plain())
        assert capsys.readouterr().out == 'It is warm.\ncalls add {"a": 1}\ncalls sub \n'
    for text, seen in [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J", "␛[2J"),
        ("a\rb\x07", "a␍b␇"),
        ("\x9b31m", "�31m"),
        ("für", "für"),
    ]:
        with subtests.test("a model does not command the terminal", text=text, seen=seen):
            assert visible(text) == seen
