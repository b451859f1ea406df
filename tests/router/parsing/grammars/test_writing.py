"""No real tokenizer's masks are needed here to see what is wrong with a grammar of calls."""

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from router.parsing.written import WRITERS, Answer, read
from services.router.parsing.answer_grammars import HarmonyWriting, MarkedWriting, ToolConstraint
from services.router.parsing.call_grammars import WRITINGS, Lark
from services.router.parsing.parser_choice import choose

SPECIAL = {"<x>": 7, "<tool_call>": 8, "[TOOL_CALLS]": 9}
TAGGED = ("qwen3_coder", "glm45", "minimax_m2", "seed_oss", "deepseek_v32")


def grammar_of(name, schema):
    asked = ToolConstraint(Lark(SPECIAL), {"f": schema})
    writing = HarmonyWriting() if name == "harmony" else MarkedWriting(None, WRITINGS[name])
    return writing.must_call(asked)


def test_what_the_client_says_is_no_special_token(subtests):
    for name in [*WRITINGS, "harmony"]:
        with subtests.test(name):
            schema = {"properties": {"<x>": {"enum": ["<x>", "b"]}, "c": {"const": "<x>"}}, "required": ["c"]}
            grammar = grammar_of(name, schema)
            assert "<[7]>" not in grammar and '"<x>"' in grammar


def test_markers_are_special_tokens_where_they_are():
    assert grammar_of("hermes", {}).startswith("start: ") and "<[8]>" in grammar_of("hermes", {})
    assert "<[9]>" in grammar_of("mistral", {})
    assert '"<minimax:tool_call>"' in grammar_of("minimax_m2", {})


def test_strings_stand_between_tags_as_they_are(subtests):
    for name in TAGGED:
        for schema, is_text in [
            ({"type": "string"}, True),
            ({"type": ["string", "null"]}, True),
            ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, True),
            ({"$ref": "#/$defs/word"}, True),
            ({"type": "integer"}, False),
            ({"$ref": "#/$defs/count"}, False),
            ({"$ref": "#/$defs/none"}, False),
            ({"enum": [1, "a"]}, False),
            (True, False),
        ]:
            with subtests.test(name=name, schema=schema, is_text=is_text):
                root = {
                    "properties": {"a": schema},
                    "$defs": {"word": {"type": "string"}, "count": {"type": "integer"}},
                }
                assert ("%json" not in grammar_of(name, root)) == is_text


BYTES = LLTokenizer("byte")


def test_a_string_ends_where_its_tag_does():
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    begin = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n"
    end = "\n</parameter>\n</function>\n</tool_call>"
    asked = ToolConstraint(Lark({}), {"f": schema})
    grammar = MarkedWriting(None, WRITINGS["qwen3_coder"]).must_call(asked)
    assert accepts(grammar, f"{begin}3{end}")
    assert not accepts(grammar, f"{begin}three{end}")


class Vocabulary:
    """It has all bytes, the end, and one special token."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256, 257)

    def __init__(self, special):
        self.tokens = [*(bytes([each]) for each in range(256)), b"<eos>", special.encode()]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


DSML = "｜DSML｜"


def test_a_string_ends_at_a_tag_with_a_special_token_in_its_middle():
    tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary(DSML)))
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}

    def taken(grammar, text):
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.get_error()
        first, *rest = text.split(DSML)
        ids = [*first.encode(), *(id_ for part in rest for id_ in (257, *part.encode()))]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
        must, may = (getattr(MarkedWriting(None, WRITINGS[name]), how) for how in ("must_call", "may_call"))
        must, may = (write(ToolConstraint(Lark({DSML: 257}), {"f": schema})) for write in (must, may))
        for value in ("hi", "", "a </b> < c </"):
            parameter = f'<{DSML}parameter name="a" string="true">{value}</{DSML}parameter>\n'
            call = f'\n<{DSML}invoke name="f">\n{parameter}</{DSML}invoke>'
            text = f"<{DSML}{block}>{call}\n</{DSML}{block}>"
            assert taken(must, text) and taken(may, f"I < look.\n\n{text}") and taken(may, f"{text}\nSo?")
            assert not taken(must, text.replace('"a"', '"b"')) and not taken(may, text.replace('"f"', '"g"'))
        assert taken(may, "a < b") and not taken(must, "a < b")


WORDS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}}
CALLED = Answer("", "", (("f", {"a": "x <b>", "n": 3}), ("f", {})))


def accepts(grammar, text):
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def marked(name, reasoning):
    return choose(name, reasoning, "", None).writing


def test_what_models_write_is_what_the_grammars_of_calls_allow():
    for name, write, reasoning in WRITERS:
        if name not in WRITINGS or write.__name__ == "mistral":  # [ARGS] is no token of these bytes
            continue
        text, asked = write(CALLED).lstrip(), ToolConstraint(Lark({}), WORDS)
        if name == "cohere":
            text = text.replace('[{"', '[\n    {"').replace('{"tool', '{"tool_call_id": "0", "tool')
            text = text.replace("}, {", "},\n    {").replace("]<", "\n]<")
        assert accepts(marked(name, reasoning).must_call(asked), text), name
        assert accepts(marked(name, reasoning).may_call(ToolConstraint(Lark({}), WORDS)), text), name
        assert not accepts(
            marked(name, reasoning).must_call(ToolConstraint(Lark({}), WORDS)), text.replace("3", "x")
        )
        assert len(read(choose(name, reasoning, "", None), [text], WORDS).calls) == 2


FURTHER = [
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"n": 3}}]'),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"n": 3}}, {"name": "f", "arguments": {}}]'),
    ("json_list", '[{"name": "f", "arguments": {"n": 3}}]'),
    ("nemotron_nano_v2", '<TOOLCALL>[{"name": "f", "arguments": {"n": 3}}]</TOOLCALL>'),
    ("internlm2", '<|action_start|><|plugin|>\n{"name": "f", "arguments": {"n": 3}}<|action_end|>'),
    ("granite_20b_fc", '<function_call> {"name": "f", "arguments": {"n": 3}}'),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
]


def test_lists_of_calls_are_bound_and_read_alike():
    for name, text in FURTHER:
        must, may = (getattr(marked(name, "none"), how) for how in ("must_call", "may_call"))
        assert accepts(must(ToolConstraint(Lark({}), WORDS)), text), name
        assert accepts(may(ToolConstraint(Lark({}), WORDS)), text), name
        assert accepts(may(ToolConstraint(Lark({}), WORDS)), "No."), name
        assert not accepts(may(ToolConstraint(Lark({}), WORDS)), text.replace('"f"', '"g"')), name
        assert read(choose(name, "none", "", None), [text], WORDS).calls, name


def test_content_stands_in_what_its_models_write_around_it():
    answer = marked("none", "cohere").then(ToolConstraint(Lark({}), {}), '"yes"')
    assert accepts(answer, "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>")
    assert accepts(answer, "yes") and not accepts(answer, "<|START_RESPONSE|>no")
    assert not marked("gemma4", "gemma4").binds_calls and marked("kimi_k2", "think").binds_calls
