"""Each format is read whole, by character and in random cuts; and calls are written as text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.parsing.written import (
    DECLARED,
    PLAIN,
    SCHEMAS,
    TYPED,
    WHOLE,
    WRITERS,
    Answer,
    choice_of,
    joined,
    mistral_old,
    read,
)
from services.router.parsing.answer_formats import CALL_FORMATS, CALL_TEXTS
from services.router.parsing.parser_choice import choose
from services.router.parsing.piece import ParsedCall
from services.router.parsing.reader import Reader

# Markers of all formats, and what JSON and tags are made of.
MARKERS = [
    *(marker for each in CALL_FORMATS.values() for marker in each.markers),
    *("<think>", "</think>", "<|start|>", "<|channel|>", "<|call|>", "</parameter>", "{", "}", '"', "\\"),
    *("<answer>", "</answer>", "<|inner_prefix|>", "[f(", "a='", "call:f{", "<function="),
]
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
# Of names and content: nothing that a format could take for a marker, and no white space at the ends.
quiet = st.from_regex(r"[\wäß語👋][\wäß語👋 .,:]{0,12}[\w👋]", fullmatch=True)
names = st.sampled_from(["f", "get_weather", "mcp.server-tool", "g2"])
loud = st.lists(st.one_of(st.sampled_from(MARKERS), words), max_size=4).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | loud,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(loud, inner, max_size=3),
    max_leaves=6,
)
# Written as text: a string alone, which no schema is needed for to tell it from a number, has no quotes.
plain_values = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.from_regex(r"[a-z👋<{][\w äß語👋\"'\\]{0,10}\n?[a-z]", fullmatch=True).filter(
        lambda text: text not in ("true", "false", "null", "none")
    ),
)


@st.composite
def answers(draw, name):
    is_plain = name in PLAIN
    keys = st.from_regex(r"[a-z]\w{0,6}", fullmatch=True) if is_plain or name == "lfm2" else loud
    values = plain_values if is_plain else json_values
    calls = draw(st.lists(st.tuples(names, st.dictionaries(keys, values, max_size=3)), max_size=3))
    content = draw(st.just("") | quiet)
    if name == "llama3_json":
        return Answer("" if calls else content, "", tuple(calls))
    return Answer(content, draw(st.just("") | quiet), tuple(calls))


@st.composite
def cut(draw, text):
    ends = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def drawn(check, examples, *how_it_writes):
    """Run the check on that many examples."""

    @settings(max_examples=examples)
    @given(data=st.data())
    def run(data):
        check(*how_it_writes, data)

    run()


def in_each_format(check, examples, subtests, formats=WRITERS):
    """Each format has as many examples of its own."""
    for name, writer, reasoning in formats:
        with subtests.test(name if writer.__name__ == "write" else writer.__name__):
            drawn(check, examples, name, writer, reasoning)


def examples_of_each_format(by_default):
    return pytest.mark.parametrize("examples", [by_default, pytest.param(40, marks=pytest.mark.exact)])


@examples_of_each_format(10)
def test_what_was_written_is_read(examples, subtests):
    in_each_format(is_read, examples, subtests)


def is_read(name, writer, reasoning, data):
    answer = data.draw(answers(name))
    if name == "template":  # transformers' parser takes </call> within a string for the end
        answer = Answer(answer.content, answer.reasoning, tuple((n, {"a": 1}) for n, _ in answer.calls))
    text = writer(answer)
    choice = choice_of(name, reasoning)
    whole = read(choice, [text], SCHEMAS)
    assert [(n, json.loads(arguments)) for n, arguments in whole.calls] == list(answer.calls)
    assert whole.content.strip() == answer.content
    assert whole.reasoning == answer.reasoning
    assert whole.broken == 0
    assert read(choice, text, SCHEMAS) == whole  # by character
    assert read(choice, data.draw(cut(text)), SCHEMAS) == whole
    begun = writer(answer)[: data.draw(st.integers(0, len(text)))]
    assert read(choice, data.draw(cut(begun)), SCHEMAS) == read(choice, [begun], SCHEMAS)


THINKERS = [each for each in WRITERS if each[2] in ("think", "mistral")]
TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


@examples_of_each_format(4)
def test_calls_that_end_thinking_which_was_never_closed_are_calls(examples, subtests):
    in_each_format(ends_thinking, examples, subtests, THINKERS)


def ends_thinking(name, writer, reasoning, data):
    opens, closes = TAGS[reasoning]
    answer = data.draw(answers(name).filter(lambda drawn: drawn.calls))
    called = writer(Answer(calls=answer.calls))
    if closes in called:
        return  # it closes the thinking, wherever it stands
    mention = data.draw(st.sampled_from(["", called.strip()[:12] + " is how it begins. ", called + "? No. "]))
    thought = (answer.reasoning or "Hm.") + data.draw(st.sampled_from([" ", "\n"])) + mention
    choice = choice_of(name, reasoning)
    for behind in ("", "\n", " So?", f"\n{closes}\nYes.", f"{closes}{called}"):
        text = opens + thought + called + behind
        whole = read(choice, [text], SCHEMAS)
        assert read(choice, data.draw(cut(text)), SCHEMAS) == whole
        assert read(choice, [text.removeprefix(opens)], SCHEMAS, f"<|assistant|>{opens}\n") == whole
        is_called, is_closed = not behind.strip() or behind.endswith(called), closes in behind
        expected = [(n, given) for n, given in answer.calls] if is_called else []
        assert [(n, json.loads(arguments)) for n, arguments in whole.calls] == expected
        told = thought if is_called and not is_closed else thought + called + behind.partition(closes)[0]
        assert (whole.reasoning, whole.broken) == (told.strip(), 0)
        assert whole.content == ("Yes." if behind.endswith("Yes.") else "")


def test_thinking_goes_on_as_soon_as_it_can_be_no_call():
    parser = choice_of("hermes", "think").parser(SCHEMAS, "<think>")
    told = [
        parser.feed(piece).reasoning
        for piece in ("a", " <tool", "_call>", " b", ' <tool_call>{"name": ', "]")
    ]
    assert told == ["a", "", "", " <tool_call> b", "", ' <tool_call>{"name": ]']


def test_thinking_that_begins_calls_without_end_is_read_in_time():
    text = "<think>" + '<tool_call>{"name": ["f", ' * 20_000
    got = read(choice_of("hermes", "think"), [text], SCHEMAS)
    assert (got.reasoning, got.calls) == (text.removeprefix("<think>").rstrip(), ())


def test_what_is_taken_and_put_back_costs_no_more_the_more_there_is():
    """This took minutes where each step copied all that was taken, or is left."""
    reader = Reader()
    reader.put("a" * 12_000_000 + "{}" * 6_000_000)
    reader.mark()
    assert len(finished(reader.word())) == 12_000_000
    for _ in range(50_000):
        assert finished(reader.next_is("{"))
        assert finished(reader.one()) + finished(reader.one()) == "{}"
    assert reader.taken == "a" * 12_000_000 + "{}" * 50_000


def finished(reading):
    try:
        next(reading)
    except StopIteration as end:
        return end.value
    raise AssertionError("it wants more text")


LONG = 'He said: "a < b"\n\t{[<tool' + "äß👋 \\n </para </arg_ ,}" * 30 + "\nend"
LONG_CALL = Answer("", "", (("f", {"days": 3, "text": LONG, "more": [1, 2]}), ("f", {"days": 4})))


def pieces_of(choice, text):
    parser = choice.parser(TYPED, "")
    return [call for part in [*map(parser.feed, text), parser.finish()] for call in part.calls]


def test_long_arguments_come_while_they_are_written(subtests):
    for name, writer, reasoning in WRITERS:
        with subtests.test(writer.__name__):
            choice = choice_of(name, reasoning)
            pieces = pieces_of(choice, writer(LONG_CALL))
            assert [(n, json.loads(arguments)) for n, arguments in joined(pieces)] == list(LONG_CALL.calls)
            if name in WHOLE or writer is mistral_old:  # a whole, or a list of all
                assert len(pieces) == 2
            else:
                assert max(len(piece.arguments) for piece in pieces[1:-1]) < 20 and len(pieces) > 300
            assert read(choice, [writer(LONG_CALL)], TYPED).calls == tuple(joined(pieces))


@examples_of_each_format(10)
def test_long_arguments_that_break_off_are_as_far_as_they_came(examples, subtests):
    in_each_format(is_as_far_as_it_came, examples, subtests)


def is_as_far_as_it_came(name, writer, reasoning, data):
    choice, text = choice_of(name, reasoning), writer(LONG_CALL)
    text = text[: data.draw(st.integers(0, len(text)))]
    whole = read(choice, [text], TYPED)
    assert read(choice, data.draw(cut(text)), TYPED) == whole
    if whole.broken and whole.calls:
        ((_, complete), *_) = read(choice, [writer(LONG_CALL)], TYPED).calls
        (_, came), *_ = whole.calls
        assert len(came) > 256
        assert complete.startswith(came[: -len("</｜DSML｜parameter>")])  # its end may begin a marker


def test_what_is_no_object_is_content_however_long():
    text = "<tool_call>{'name': 'f', 'arguments': {'text': '" + LONG + "'}}</tool_call>"
    got = read(choice_of("hermes", "none"), text, TYPED)
    assert (got.content, got.calls, got.broken) == (text, (), 1)
    text = '<tool_call>{"name": "f", "arguments": {' + "'text': 1, " * 100 + "}}</tool_call>"
    got = read(choice_of("hermes", "none"), text, TYPED)
    assert (got.content, got.calls, got.broken) == (text, (), 1)


noise = st.lists(st.one_of(st.sampled_from(MARKERS), words), max_size=12).map("".join)


@examples_of_each_format(10)
def test_any_text_is_read_somehow_and_the_same_in_all_cuts(examples, subtests):
    in_each_format(is_read_somehow, examples, subtests)


def is_read_somehow(name, writer, reasoning, data):
    text, choice = data.draw(noise), choice_of(name, reasoning)
    whole = read(choice, [text], SCHEMAS)
    assert read(choice, text, SCHEMAS) == whole
    assert read(choice, data.draw(cut(text)), SCHEMAS) == whole
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)


# The tags that end an argument and its call, and which of them may be missing before another call.
CLOSING_TAGS = {
    "qwen3_coder": (
        ("\n</parameter>", "\n</function>", "\n</tool_call>"),
        ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)),
    ),
    "glm45": (("</arg_value>", "\n</tool_call>"), ((0,), (1,))),
    "minimax_m2": (("</parameter>", "\n</invoke>", "\n</minimax:tool_call>"), ((0,), (1,))),
}


CLOSED_BY_TAGS = [each for each in WRITERS if each[0] in CLOSING_TAGS]


@examples_of_each_format(10)
def test_tags_that_are_left_out_are_told_by_what_stands_there(examples, subtests):
    in_each_format(is_told_without_tags, examples, subtests, CLOSED_BY_TAGS)


def is_told_without_tags(name, writer, _reasoning, data):
    value = data.draw(quiet)
    calls = (("f", {"s": value, "n": 3, "t": value + "\n" + value}), ("f", {"t": value, "n": 4}))
    text, (ends, missing) = writer(Answer(calls=calls)), CLOSING_TAGS[name]
    for end in reversed(ends[1:]):
        assert text.endswith(end)
        text = text.removesuffix(end)
    for index in data.draw(st.sampled_from(missing)):
        text = text.replace(ends[index], "", data.draw(st.sampled_from([-1, 1])))
    text += data.draw(st.sampled_from(ends[1:]))
    choice = choice_of(name, "none")
    got = read(choice, [text], DECLARED)
    assert [(n, json.loads(arguments)) for n, arguments in got.calls] == list(calls)
    assert (got.content, got.broken) == ("", 0)
    assert read(choice, data.draw(cut(text)), DECLARED) == got


def test_no_marker_is_a_part_of_another(subtests):
    for name, format_ in CALL_FORMATS.items():
        with subtests.test(name):
            markers = format_.call_markers.opens
            assert not any(one in other for one in markers for other in markers if one != other)


CALLS = [ParsedCall("look_up", '{"what": "the café\'s \\"ß\\"", "limit": 3}'), ParsedCall("g2", "{}")]
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
    [call] = [ParsedCall("f", '{"a": true, "b": null, "c": [1.5], "d": "it\'s"}')]
    written = '<|tool_call_start|>[f(a=True, b=None, c=[1.5], d="it\'s")]<|tool_call_end|>'
    assert CALL_TEXTS["lfm2"]([call]) == written
