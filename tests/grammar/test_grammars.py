import asyncio
import json
import threading
from pathlib import Path

import pytest

from exactness.checkpoints import tiny_checkpoint
from grammar.written import ids_of_text
from services.grammar.grammars import _IS_LARK, Grammars
from services.grammar.vocabulary import Vocabulary, read_vocabulary
from services.values.errors import InvalidRequest
from services.values.request import Constraint, ConstraintKind

JSON_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)
GBNF = 'root ::= "x" [0-9]+ | "y"\n'
LARK = 'start: "<" %json {"type": "integer"} ">"'
MANY_PROPERTIES = json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(700)}})


def constraint(kind: str, *texts: str) -> Constraint:
    return Constraint(ConstraintKind(kind), texts)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(tiny_checkpoint(tokenizer="bytes"), 259)


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(tiny_checkpoint(tokenizer="bytes"), 259)


def test_what_fits(subtests, grammars, vocabulary):
    for wanted, whole, wrong in [
        (JSON_OBJECT, '{"a":{"b":[null]}}', '{"a": 1}'),
        (JSON_OBJECT, "{}", "[]"),
        (constraint("json_schema", '{"type":"array","items":{"type":"integer"}}'), "[1,-2]", "[1.5]"),
        (constraint("json_schema", "true"), '"x"', "'x'"),
        (constraint("regex", r"ab|cd/é"), "cd/é", "abc"),
        (constraint("regex", r"^\d{2}$"), "12", "1a"),
        (constraint("grammar", GBNF), "x42", "xy"),
        (constraint("grammar", LARK), "<-7>", "<a>"),
        (constraint("json_schema", '{"multipleOf": 0.05, "type": "number"}'), "0.15", "0.151"),
        (constraint("choice", *map(str, range(6000)), "37000"), "37000", "6000,"),
        (constraint("choice", "yes", 'no "/\\\n\tü', "yes"), 'no "/\\\n\tü', "no, "),
    ]:
        with subtests.test(wanted=wanted):
            matcher, ids = grammars.matcher(wanted), ids_of_text(vocabulary, whole)
            assert matcher.num_fitting(ids) == len(ids)
            assert matcher.num_fitting(ids_of_text(vocabulary, wrong)) < len(wrong)
            matcher.advance(ids)
            assert matcher.inner.is_accepting()


def test_what_cannot_be_kept_to_is_refused_by_name(subtests, grammars):
    for wanted, problem in [
        (constraint("json_schema", "{"), "json_schema is not JSON: "),
        (constraint("json_schema", "[1]"), "json_schema must be a JSON object$"),
        (constraint("json_schema", '{"const": "\\ud800"}'), "json_schema cannot be read: "),
        (constraint("json_schema", '{"a":' * 9000), "json_schema is not JSON: "),
        (constraint("json_schema", '{"items":' * 300 + "{}" + "}" * 300), "json_schema "),
        (constraint("json_schema", '{"uniqueItems": true}'), 'json_schema is not supported: .*"uniqueItems"'),
        (
            constraint("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'),
            'json_schema is not supported: .*"not"',
        ),
        (constraint("json_schema", '{"$ref": "http://localhost/a"}'), "json_schema is not supported: "),
        (constraint("regex", "("), "regex is not supported: .* unclosed group$"),
        (constraint("regex", "(?=a)b"), "regex is not supported: .*look-ahead"),
        (constraint("regex", r"[^\s\S]"), "regex allows no text that this model can write$"),
        (constraint("json_schema", '{"multipleOf": 999983}'), "json_schema is not supported: .*multipleOf"),
        (
            constraint(
                "grammar", r'start: %json {"allOf": [{"multiple\u004ff": 99.7}, {"multipleOf": 991}]}'
            ),
            "grammar is not supported: .*multipleOf",
        ),
        (constraint("regex", "(a{1000}){1000}"), "regex is not supported: .*too many expressions"),
        (constraint("grammar", 'start: x{1000000}\nx: "x"'), "grammar is not supported: .*Too many items"),
        (constraint("json_schema", MANY_PROPERTIES), "json_schema is not supported: .*Current row has"),
        (constraint("grammar", 'root ::= "a" x'), "grammar cannot be read as GBNF: .*'x'"),
        (constraint("grammar", 'start: "a" x'), 'grammar is not supported: .*"x"'),
        (constraint("grammar", "start: <|nothing|>"), "grammar is not supported: .*special token"),
    ]:
        with subtests.test(wanted=wanted):
            for _ in range(2):  # nor is it remembered
                with pytest.raises(InvalidRequest, match=rf"^sampling\.constraint\.{problem}") as refused:
                    grammars.check(wanted)
            assert "\n" not in str(refused.value)


def test_a_matcher_goes_on_after_what_was_written_elsewhere(
    grammars: Grammars, vocabulary: Vocabulary
) -> None:
    wanted, ids = constraint("regex", "abc"), ids_of_text(vocabulary, "abc")
    matcher = grammars.matcher(wanted, ids[:2])
    assert matcher.num_fitting(ids[2:]) == 1
    assert not matcher.is_complete
    matcher.advance(ids[2:])
    assert matcher.is_complete
    with pytest.raises(InvalidRequest, match=r'^sampling\.constraint: .*"b"'):
        grammars.matcher(wanted, ids[1:])


def test_grammars_are_compiled_once_while_they_are_remembered(subtests):
    with subtests.test("a grammar is compiled once while it is remembered"):
        grammars = Grammars(tiny_checkpoint(tokenizer="bytes"), 259, kept=2)
        for pattern in ("a", "b", "a", "c", "a", "b"):
            grammars.check(constraint("regex", pattern))
        assert (grammars.counts.asked, grammars.counts.compiled) == (6, 4)
        assert grammars.counts.compile_s > 0
    with subtests.test("long ones are remembered in smaller number"):
        grammars = Grammars(tiny_checkpoint(tokenizer="bytes"), 259, kept_bytes=10)
        for pattern in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb", "bbbb"):
            grammars.check(constraint("regex", pattern))
        assert grammars.counts.compiled == 4
        for pattern in ("longer than all may be", "longer than all may be", "a", "a"):
            grammars.check(constraint("regex", pattern))
        assert grammars.counts.compiled == 7


async def test_slow_ones_hold_up_no_other_thread() -> None:
    grammars, go_on = Grammars(None, 0), threading.Event()
    slow = [asyncio.ensure_future(grammars.beside(go_on.wait, 30.0)) for _ in range(40)]
    assert await asyncio.wait_for(asyncio.to_thread(int, "7"), 10.0) == 7
    assert not any(each.done() for each in slow)
    go_on.set()
    assert all(await asyncio.gather(*slow))


def test_what_a_model_cannot_write_is_refused(subtests):
    for directory in [None, Path("/nowhere")]:
        with (
            subtests.test("a model without a tokenizer json", directory=directory),
            pytest.raises(InvalidRequest, match=r"^sampling\.constraint cannot be used"),
        ):
            Grammars(directory, 10).check(JSON_OBJECT)
    with subtests.test("what a vocabulary cannot write is refused"):
        characters = Grammars(tiny_checkpoint(), 512)  # without a newline
        with pytest.raises(InvalidRequest, match="grammar allows no text that this model can write"):
            characters.check(constraint("grammar", 'start: "ab\\ncd"'))
        characters.check(constraint("grammar", 'start: "ab\\ncd" | "abc"'))


def test_blank_lines_are_no_work() -> None:
    """Each was looked at from each before it: hours for these."""
    lines = "\n" * 1_000_000
    assert not _IS_LARK.search(f"{lines}x")
    assert _IS_LARK.search(f"{lines} \t{LARK}") and _IS_LARK.search(f"# a\r\n{LARK}")
