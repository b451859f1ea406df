import pytest

from router.parsing.written import OWN
from services.router.parsing.parser_choice import choose
from services.values.errors import ConfigError

# What tells them, of public templates.
TEMPLATES = {
    ("hermes", "none"): """{"name": <function-name>}\\n</tool_call>' }} {{- '<tool_call>\\n{"name": "' }}""",
    ("hermes", "think"): '{{- \'<tool_call>\\n{"name": "\' }} <think>\\n\\n</think>\\n\\n',
    ("qwen3_coder", "think"): "'\\n<tool_call>\\n<function=' + name '<parameter=' <think>",
    (
        "glm45",
        "think",
    ): "'\\n<tool_call>' + tc.name <arg_key>{{ k }}</arg_key> <arg_value> <think></think>",
    ("minimax_m2", "think"): "set toolcall_begin_token = '<minimax:tool_call>' <think>",
    ("deepseek_v3", "think"): "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '\\n' + '```json' </think>",
    (
        "deepseek_v31",
        "think",
    ): "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name </think>",
    ("mistral", "none"): "[TOOL_CALLS] [AVAILABLE_TOOLS]",
    ("mistral", "mistral"): "[TOOL_CALLS] [THINK]",
    ("llama3_json", "none"): """<|start_header_id|> {{- '{"name": "' + n }} {{- '"parameters": ' }}""",
    ("harmony", "harmony"): "<|start|>assistant<|channel|>analysis<|message|> to=functions.",
    ("minimax_m3", "minimax_m3"): "set ns = ']<]minimax[>[' <tool_call> <invoke name= <mm:think>",
    ("seed_oss", "seed"): "<seed:tool_call> <function= <parameter= <seed:think>",
    ("tool_calls", "none"): "within <tool_call></tool_call> tags {{ '<tool_calls>[' }}",
    ("kimi_k2", "think"): "<|tool_calls_section_begin|><|tool_call_begin|> <think></think>",
    ("deepseek_v32", "think"): "set dsml = '｜DSML｜' <function_calls> </think>",
    ("cohere", "cohere"): "<|START_THINKING|> <|START_ACTION|>[",
    ("none", "none"): "{{ messages }}",
}


def test_a_template_tells_its_format(subtests):
    for names, template in TEMPLATES.items():
        with subtests.test(str(names)):
            choice = choose("auto", "auto", template, None)
            assert (choice.tools, choice.reasoning) == names


CALLED = '{"name": "look_up", "arguments": {"count": 7}}'
SHOWN = {
    # What it shows, whatever its words say.
    "hermes": ("<tool_calls> <tool_call>", f"<tool_call>\n{CALLED}\n</tool_call>"),
    "tool_calls": ("<tool_call></tool_call>", f"Yes\n<tool_calls>[{CALLED}]</tool_calls>"),
    "json_list": ("<TOOLCALL> or <tool_call>", f"[{CALLED}]<|eot_id|>"),
    "pythonic": ("", "[look_up(count=7)]<|eot_id|>"),
    # None: it shows a call in a way that no format has, though it tells of one.
    "none": ("<tool_call>", f"<|tool|>look_up {CALLED}"),
}


def test_a_template_writes_what_it_shows(subtests):
    for name, words, shown in [(name, *each) for name, each in SHOWN.items()]:
        with subtests.test(name):
            assert choose("auto", "auto", words, None, (shown,)).tools == name


def test_a_tokenizers_own_word_comes_first(subtests):
    for tools, reasoning, names in [
        ("auto", "auto", ("template", "template")),
        ("none", "auto", ("none", "template")),
        ("auto", "none", ("template", "none")),
        ("hermes", "auto", ("hermes", "think")),
        ("auto", "think", ("hermes", "think")),
        ("none", "none", ("none", "none")),
    ]:
        with subtests.test(tools=tools, reasoning=reasoning, names=names):
            choice = choose(tools, reasoning, "<tool_call> <think>", OWN)
            assert (choice.tools, choice.reasoning) == names


def test_what_cannot_be_is_refused(subtests):
    for tools, reasoning, own, problem in [
        ("harmony", "think", None, "do not go together"),
        ("hermes", "harmony", None, "do not go together"),
        ("template", "think", OWN, "do not go together"),
        ("template", "auto", None, "no response_template"),
        ("auto", "auto", {"fields": {}}, "cannot be read"),
        ("auto", "auto", {**OWN, "start_anchor": 1}, "cannot be read"),
        ("auto", "auto", {"start_anchor": "a", "fields": {"a": {"open_pattern": "("}}}, "cannot be read"),
    ]:
        with subtests.test(problem), pytest.raises(ConfigError, match=problem):
            choose(tools, reasoning, "", own)


def test_special_tokens_that_are_looked_for_are_shown():
    choice = choose("deepseek_v31", "think", "", None)
    assert choice.shows("<｜tool▁sep｜>") and choice.shows("</think>")
    assert not choice.shows("<｜end▁of▁sentence｜>") and not choice.shows("[TOOL_CALLS]")
    own = choose("template", "template", "", OWN)
    assert own.shows("</call>") and own.shows("<t>") and not own.shows("<other>")
    several = choose("internlm2", "none", "", None)  # whose marker is two tokens
    assert several.shows("<|action_start|>") and several.shows("<|plugin|>")
    kimi = choose("none", "kimi_k3", "", None)
    assert kimi.shows("<|open|>") and kimi.shows("<|sep|>") and not kimi.shows("<|end_of_msg|>")
    pattern = {**OWN, "fields": {"content": {"close_pattern": r"\s*<\|im_end\|>"}}}
    assert choose("auto", "auto", "", pattern).shows("<|im_end|>")


def test_harmony_ends_with_a_call():
    assert choose("harmony", "auto", "", None).reasoning == "none"
    assert choose("auto", "auto", "<|channel|><|message|>", None).stop_token == "<|call|>"
    assert choose("hermes", "think", "", None).stop_token is None
