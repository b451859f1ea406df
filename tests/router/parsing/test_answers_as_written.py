"""Models of one format or another write this, right or broken, and it is read as the rows say."""

import json

from router.parsing.written import (
    DECLARED,
    SCHEMAS,
    TYPED,
    WRITERS,
    Answer,
    choice_of,
    dumps,
    read,
)
from services.router.parsing.parser_choice import choose


def test_a_call_that_cannot_be_read_is_content(subtests):
    for name, text in [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "never'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", "the tag <tool_call> opens\n\n a call"),
        ("hermes", "<tool_call>" + '{"a":' * 2000 + "1" + "}" * 2000),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
        ("qwen3_coder", "<function= \n opens one>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1'),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 1]'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{]"),
        ("llama3_json", '<|python_tag|>print("x")'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>[1"),
        ("harmony", "<|channel|>final<|start|>"),
    ]:
        with subtests.test(text[:80]):
            reasoning = "harmony" if name == "harmony" else "none"
            got = read(choice_of(name, reasoning), text, SCHEMAS)
            assert (got.content, got.reasoning, got.calls) == (text, "", ())
            assert got.broken >= 1


HARMONY_TEXT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


def test_a_harmony_message_goes_to_a_tool_wherever_its_header_says_so(subtests):
    for before in ["", HARMONY_TEXT]:
        for header in [
            " to=functions.f<|channel|>commentary json",
            "to=functions.f<|channel|>commentary <|constrain|>json",
            " to=functions.f",
            " to=f<|channel|>analysis code",
            "<|channel|>commentary to=f <|constrain|>json",
        ]:
            with subtests.test(before=before, header=header):
                choice = choice_of("harmony", "harmony")
                for pieces in (lambda text: [text], list):
                    got = read(choice, pieces(before + header + '<|message|>{"s": "a"}<|call|>'), TYPED)
                    assert (got.content, got.reasoning) == ("", "hm" * bool(before))
                    assert got.calls == (("f", '{"s": "a"}'),) and got.broken == 0


def test_other_text_before_a_harmony_message_is_content(subtests):
    for text, content in [
        (" to=x<|channel|>final<|message|>Hi", " to=xHi"),
        (" to=functions of two variables", " to=functions of two variables"),
        (" to=functions.f<|channel|>commentary json<|message|>[1", None),
        (" to=functions.f is\nits header", None),
        ("<|message|>Hi", "Hi"),
        (" \nHi", " \nHi"),
        ("a to=functions.f<|channel|>final<|message|>b", "a to=functions.fb"),
    ]:
        with subtests.test(text):
            choice = choice_of("harmony", "harmony")
            for pieces in ([text], text):
                got = read(choice, pieces, TYPED)
                assert (got.content, got.calls) == (text if content is None else content, ())


def test_a_value_may_hold_tags_that_end_no_argument(subtests):
    for inner in [
        "<parameter=",
        "<parameter=other>\n1",
        "<parameter=s>",
        "</function> is a tag",
        "</tool_call>.",
        "<parameter=n",
    ]:
        with subtests.test(inner):
            text = f"<tool_call>\n<function=f>\n<parameter=s>\nA {inner}\n"
            text += "</parameter>\n</function>\n</tool_call>"
            for pieces in ([text], text):
                got = read(choice_of("qwen3_coder", "none"), pieces, DECLARED)
                assert got.calls == (("f", dumps({"s": f"A {inner}"})),) and got.content == ""


FILES = {"write": {"properties": {key: {"type": "string"} for key in ("content", "path", "mode")}}}
BEGINNINGS = {
    "qwen3_coder": "<parameter={}>",
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>",
    "minimax_m2": '<parameter name="{}">',
}
MENTIONS = (  # {} is the tag that begins the next argument
    "See {} tag",
    "{}",
    "See\n{} tag",
    "See\n{} and\n{}",
    "doc: </function>\n</tool_call>\n<tool_call> more",
    "doc:\n</invoke>\n<invoke name= more",
    "doc:\n</tool_call>\n<tool_call>\n<function=write>",
)


def test_a_value_that_mentions_tags_is_whole(subtests):
    for name in BEGINNINGS:
        with subtests.test(name):
            begin = BEGINNINGS[name]
            [writer] = (each[1] for each in WRITERS if each[0] == name)
            for mention in MENTIONS:
                given = {"content": mention.replace("{}", begin.format("path")), "path": "x", "mode": "a"}
                text = writer(Answer(calls=(("write", given), ("write", given))))
                for pieces in ([text], text):
                    got = read(choice_of(name, "none"), pieces, FILES)
                    assert [arguments for _, arguments in got.calls] == [dumps(given)] * 2, mention
                    assert (got.content, got.broken) == ("", 0)


def test_an_argument_that_is_given_twice_makes_no_call():
    for name, begin in BEGINNINGS.items():
        [writer] = (each[1] for each in WRITERS if each[0] == name)
        text = writer(Answer(calls=(("write", {"path": "x", "mode": "a"}),)))
        twice = text.replace(begin.format("mode"), begin.format("path"))
        for pieces in ([twice], twice):
            got = read(choice_of(name, "none"), pieces, FILES)
            assert (got.content, got.calls, got.broken) == (twice, (), 1)


OBJECTS = ('{"name": "f", "parameters": {"s": "}{"}}', '{"name": "f", "arguments": {}}')


def test_objects_that_follow_one_another_are_calls(subtests):
    for name, begin, end in [
        ("llama3_json", "", ""),
        ("llama3_json", "<|python_tag|>", ""),
        ("hermes", "<tool_call>\n", "\n</tool_call>"),
        ("mistral", "[TOOL_CALLS]", ""),
    ]:
        with subtests.test(name, begin=begin):
            choice = choice_of(name, "none")
            for between in ("\n", ", ", ";", "; ", "\n\n", ""):
                text = begin + between.join((*OBJECTS, *OBJECTS)) + end
                for pieces in ([text], text):
                    got = read(choice, pieces, TYPED)
                    assert got.calls == (("f", '{"s": "}{"}'), ("f", "{}")) * 2 and (
                        got.content,
                        got.broken,
                    ) == (
                        "",
                        0,
                    )
            text = begin + OBJECTS[0] + ", and so on"
            for pieces in ([text], text):
                got = read(choice, pieces, TYPED)
                assert (len(got.calls), got.content, got.broken) == (1, ", and so on", 0)


def test_deepseek_calls_that_nothing_closes():
    for name, call in (
        ("deepseek_v31", "f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek_v3", "function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"),
    ):
        text = "<｜tool▁calls▁begin｜>" + f"<｜tool▁call▁begin｜>{call}" * 2
        for pieces in ([text], text):
            got = read(choice_of(name, "none"), pieces)
            assert (got.calls, got.content, got.broken) == ((("f", "{}"),) * 2, "", 0)


def test_content_and_calls_go_on_behind_what_was_no_call():
    text = " <tool_call> no\n\n<tool_call>[]  \n done "
    got = read(choice_of("hermes", "think"), text, SCHEMAS)
    assert (got.content, got.calls, got.broken) == (text, (), 2)
    text = (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {,}}</tool_call>\n'
        '<tool_call>{"name": "g2", "arguments": null}</tool_call>'
    )
    got = read(choice_of("hermes", "think"), text, SCHEMAS)
    assert got.calls == (("f", "{}"), ("g2", "{}")) and got.broken == 1
    assert got.content == '<tool_call>{"name": "f", "arguments": {,}}</tool_call>\n'


def test_an_answer_in_json_is_no_call_of_llama(subtests):
    for text in [
        '{"answer": 42}',
        '{"name": "Ada", "age": 36}',
        ' {"name": 1}\n\n and so on',
        '{"a": {"b": "}"}}',
    ]:
        with subtests.test(text):
            got = read(choice_of("llama3_json", "none"), text, SCHEMAS)
            assert (got.content.lstrip(), got.calls, got.broken) == (text.lstrip(), (), 0)


def test_arguments_are_as_the_model_wrote_them():
    arguments = '{"b": 1.0,  "a": "\\u00e4", "b": 1e2}'
    text = f'<tool_call>{{"arguments" : {arguments} , "name":"f"}}</tool_call>'
    assert read(choice_of("hermes", "none"), text).calls == (("f", arguments),)
    twice = f'<tool_call>{{"name":"f","arguments":{dumps(arguments)}}}</tool_call>'
    assert read(choice_of("hermes", "none"), twice).calls == (("f", arguments),)


def test_thinking_that_the_prompt_began(subtests):
    for name in ["hermes", "deepseek_v31", "mistral"]:
        with subtests.test(name):
            reasoning, opens = ("mistral", "[THINK]") if name == "mistral" else ("think", "<think>")
            closes = opens.replace("<", "</").replace("[T", "[/T")
            choice = choice_of(name, reasoning)
            text = f"\nhm, {opens} {closes}\n\nYes."
            for prompt_end in (f"<|assistant|>{opens}", f"<|assistant|>{opens}\n"):
                got = read(choice, text, None, prompt_end)
                assert (got.content, got.reasoning) == ("Yes.", f"hm, {opens}")
                got = read(choice, f"{opens}\n{text}", None, prompt_end)  # some write it once more
                assert (got.content, got.reasoning) == ("Yes.", f"hm, {opens}")
            got = read(choice, "Yes.", None, f"<|assistant|>{opens}\n\n{closes}\n\n")
            assert (got.content, got.reasoning) == ("Yes.", "")


def test_thinking_that_the_prompt_of_an_own_template_began():
    choice = choice_of("template", "template")
    got = read(choice, "hm</t>Yes.", None, "<user>a<t>b</t><assistant><t>\n")
    assert (got.content, got.reasoning) == ("Yes.", "hm")
    got = read(choice, "hm</t>Yes.", None, "no anchor <t>")
    assert (got.content, got.reasoning) == ("hm</t>Yes.", "")


def test_a_broken_call_of_an_own_template_is_content():
    text = 'Look: <call>{"name": "f", "arguments": {,}}</call><call>{"name": "f", "arguments": {}}</call>'
    got = read(choice_of("template", "template"), text)
    assert got.content == 'Look: <call>{"name": "f", "arguments": {,}}'
    assert got.calls == (("f", "{}"),) and got.broken == 1


def test_without_tools_calls_are_content(subtests):
    for name, writer, reasoning in WRITERS:
        with subtests.test(writer.__name__):
            text = writer(Answer("", "", (("f", {"a": 1}),)))
            choice = choice_of(name, reasoning)
            parser = choice.parser(None, "")
            if reasoning == "none":
                assert parser is None
                continue
            parts = [*map(parser.feed, text), parser.finish()]
            content = "".join(part.content for part in parts)
            assert not any(part.calls or part.reasoning for part in parts)
            assert content.strip() == (text.strip() if name != "template" else text.removesuffix("</call>"))


def test_while_it_thinks():
    parser = choice_of("hermes", "think").parser({}, "")
    told = []
    for piece in ("<thi", "nk>", "hm", "</think>", "Yes"):
        parser.feed(piece)
        told.append(parser.thinks)
    assert told == [False, True, True, False, False]
    parser = choice_of("harmony", "harmony").parser({}, "")
    told = []
    for piece in ("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>"):
        parser.feed(piece)
        told.append(parser.thinks)
    assert told == [False, False, True, True, False, False]


def test_text_comes_as_soon_as_it_can_be_no_marker():
    parser = choice_of("hermes", "think").parser({}, "")
    assert [parser.feed(piece).content for piece in ("a", " < ", "b<tool", "_cal", "x", "\n")] == [
        *("a", " < ", "b", "", "<tool_calx", "\n")
    ]


F = ("f", {"a": 1})
LOOK = ("look", {"where": "Rome", "days": [1, 2]})
# Formats that share a reading with those above, and what their models do beside.
FURTHER = [
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]', "", (F, ("f", {}))),
    ("granite", 'Yes.<tool_call>[{"name": "f", "arguments": {"a": 1}}]', "Yes.", (F,)),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", (F,)),
    ("phi4_mini", "Use functools for it.", "Use functools for it.", ()),
    ("phi4_mini", '{"name": "f", "arguments": {"a": 1}}', "", (F,)),
    ("nemotron_nano_v2", '<TOOLCALL>[{"name": "f", "arguments": "{\\"a\\": 1}"}]</TOOLCALL>', "", (F,)),
    (
        "tool_calls",
        '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f"}\n</tool_calls>',
        "",
        (F, ("f", {})),
    ),
    ("tool_calls", "<tool_calls>[]</tool_calls>", "", ()),
    (
        "internlm2",
        'Yes.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>',
        "Yes.",
        (F,),
    ),
    (
        "gigachat3",
        'Yes.\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
        "Yes.\n\n",
        (F,),
    ),
    ("gigachat3", '<|function_call|>{"name": "f", "arguments": {"a": 1}}', "", (F,)),
    (
        "granite_20b_fc",
        '<function_call> {"name": "f", "arguments": {"a": 1}}\n<function_call> {"name": "f"}',
        "",
        (F, ("f", {})),
    ),
    (
        "command_r",
        'Plan.\nAction:```json\n[\n  {"tool_name": "f", "parameters": {"a": 1}}\n]```',
        "Plan.\n",
        (F,),
    ),
    ("command_r", "Action: none.", "Action: none.", ()),
    ("llama4", '[look(where="Rome", days=[1, 2]), f(a=1)]', "", (LOOK, F)),
    ("llama4", '{"name": "f", "parameters": {"a": 1}}; {"name": "f"}', "", (F, ("f", {}))),
    ("llama4", "<|python_start|>[f(a=1)]<|python_end|>", "", (F,)),
    ("llama4", '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": 1}}', "", (F,)),
    ("pythonic", "[f(a=1), look(where='Rome', days=[1, 2],)]", "", (F, LOOK)),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", ()),
    ("pythonic", "[1] is a note, [f(a=1)]", "[1] is a note, [f(a=1)]", ()),
    ("json_list", '[{"name": "f", "arguments": {"a": 1}}]', "", (F,)),
    ("json_list", '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', "", (F,)),
    ("json_list", "[]", "[]", ()),
    ("json_list", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', ()),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>Yes.', "Yes.", (F,)),
    (
        "lfm2",
        "<|tool_call_start|>[f(a=None, b={'c': [True, -.5e1]}, d=\"it's\\n\")]<|tool_call_end|>",
        "",
        (("f", {"a": None, "b": {"c": [True, -5.0]}, "d": "it's\n"}),),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(a=b)]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=b)]<|tool_call_end|>",
        (),
    ),
    (
        "functiongemma",
        "<start_function_call>call:look{where:<escape>Rome<escape>,days:<escape>[1,2]<escape>}<end_function_call>",
        "",
        (LOOK,),
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:{b:<|"|>x, {y}<|"|>,c:[]},d:null}<tool_call|>',
        "",
        (("f", {"a": {"b": "x, {y}", "c": []}, "d": None}),),
    ),
    (
        "minicpm5",
        '<function name="f"><param name="a">1</param></function>\n'
        '<function name="look"><param name="where"><![CDATA[a</param>]]></param></function>',
        "",
        (F, ("look", {"where": "a</param>"})),
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>Yes.',
        "Yes.",
        (F,),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n'
        '<｜DSML｜parameter name="where" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        (LOOK,),
    ),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=a>1</parameter></function><function=f></function></seed:tool_call>",
        "",
        (F, ("f", {})),
    ),
]
FURTHER_SCHEMAS = {
    "f": {"type": "object"},
    "look": {"properties": {"where": {"type": "string"}, "days": {"type": "array"}}},
}


def test_further_formats_and_what_their_models_do():
    for name, text, content, calls in FURTHER:
        got = read(choose(name, "none", "", None), [text], FURTHER_SCHEMAS)
        assert [(n, json.loads(arguments)) for n, arguments in got.calls] == list(calls), text
        assert got.content == content, text
        assert read(choose(name, "none", "", None), text, FURTHER_SCHEMAS) == got, text


def test_what_stands_in_elements_is_what_its_schema_says():
    space = "]<]minimax[>["
    schema = {
        "properties": {
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
            "none": {"type": ["array", "null"]},
            "empty": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "note": {"type": "string"},
        },
        "$defs": {"item": {"properties": {"sku": {"type": "string"}, "n": {"type": "integer"}}}},
    }
    tags = '<tool_call>~<invoke name="f">~<items>~<item>~<sku>7~</sku>~<n>2~</n>~</item>'
    tags += "~<item>~<n>3~</n>~</item>~</items>~<none>~</none>~<empty>~</empty>"
    tags += "~<note>a < b~</note>~<free>~<x>1~</x>~</free>~</invoke>~</tool_call>"
    got = read(choose("minimax_m3", "none", "", None), space + tags.replace("~", space), {"f": schema})
    [(_, arguments)] = got.calls
    items = [{"sku": "7", "n": 2}, {"n": 3}]
    assert json.loads(arguments) == {
        "items": items,
        "none": [],
        "empty": {},
        "note": "a < b",
        "free": {"x": 1},
    }


WRAPPED = [
    ("think_answer", "<think>\nR\n</think>\n<answer>\nC\n</answer>", "R", "C"),
    ("think_answer", "<answer>a </answer> b</answer>", "", "a </answer> b"),
    ("think_answer", "C, as <answer> says", "", "C, as <answer> says"),
    ("think_answer", "<think>R</think><response>C</response>", "R", "C"),
    ("cohere", "<|START_THINKING|>R<|END_THINKING|><|START_TEXT|>C<|END_TEXT|>", "R", "C"),
    (
        "kimi_k3",
        "<|open|>think<|sep|>R<|close|>think<|sep|><|open|>response<|sep|>C<|close|>response<|sep|><|close|>message<|sep|>",
        "R",
        "C",
    ),
    ("granite", "Here is my thought process: R\n\nHere is my response: C", "R", "C"),
]


def test_what_stands_around_content_is_none():
    for reasoning, text, thought, content in WRAPPED:
        got = read(choose("none", reasoning, "", None), [text])
        assert (got.reasoning, got.content.strip()) == (thought, content), text
        assert read(choose("none", reasoning, "", None), text) == got, text
    called = '<answer>C\n<tool_calls>[{"name": "f"}]</tool_calls></answer>'
    got = read(choose("tool_calls", "think_answer", "", None), called, SCHEMAS)
    assert (got.content.strip(), got.calls) == ("C", (("f", "{}"),))
    for name, written in (("pythonic", "[f(a=1)]"), ("llama3_json", '{"name": "f", "parameters": {"a": 1}}')):
        got = read(choose(name, "think", "", None), [f"<think>R</think>\n\n{written}"], SCHEMAS)
        assert (got.reasoning, got.content, len(got.calls)) == ("R", "", 1)
