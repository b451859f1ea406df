"""The templates show a plain tool loop, and the text that models write is what they show of it."""

from pathlib import Path

import pytest

from router.parsing.written import Answer, deepseek_v3, deepseek_v31
from router.templates.formats import FORMATS, Call, Format, Said
from services.router import text
from services.router.parsing.parser_choice import PROBE, PROBE_SCHEMA, choose
from services.router.text.answer_message import AnswerCall
from services.router.text.chat_turns import Turn
from services.router.text.tokenizer import Tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def _history(format_: Format, said: Said, *, as_string: bool) -> list[dict[str, object]]:
    [call] = said.calls
    arguments = call.dumps() if as_string else dict(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    answer = {
        "role": "assistant",
        "content": said.content,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }
    if said.reasoning:
        answer |= {"reasoning_content": said.reasoning, "thinking": said.reasoning}
    return [
        {"role": "user", "content": "What is it?"},
        answer,
        {"role": "tool", "content": "A café", "tool_call_id": "abcdefghi"},
    ]


def test_what_a_model_writes_is_what_its_template_shows(tmp_path, subtests: pytest.Subtests) -> None:
    for name in FORMATS:
        with subtests.test(name):
            format_ = FORMATS[name]
            said = Said(
                reasoning="So be it." * format_.thinks, calls=[Call("look_up", {"what": "ß", "n": 3})]
            )
            tokenizer = Tokenizer(str(format_.save(tmp_path / name)))
            render = tokenizer._backend.apply_chat_template
            messages = _history(format_, said, as_string=name == "deepseek")
            asked = render(messages[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True)
            whole = render(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
            assert "look_up" in asked
            if name == "gpt_oss":  # whose history has the call's address elsewhere
                assert "<|channel|>analysis<|message|>So be it.<|end|>" in whole and "<|call|>" in whole
                continue
            written = format_.written(said)
            assert whole.startswith(asked + written), (whole, asked + written)
            assert {tokenizer.token_text(i) for i in tokenizer.eos_token_ids} >= {format_.end}
            assert tokenizer.decode(tokenizer.encode("A café\n")) == "A café\n"


def chosen(tokenizer: Tokenizer) -> tuple[str, str]:
    shown = tokenizer.shown_call(PROBE.name, PROBE.arguments, PROBE_SCHEMA)
    choice = choose("auto", "auto", tokenizer.chat_template, None, shown)
    return choice.tools, choice.reasoning


def test_the_format_is_the_one_that_a_template_shows(tmp_path) -> None:
    tools = {name: chosen(Tokenizer(str(FORMATS[name].save(tmp_path / name))))[0] for name in FORMATS}
    assert tools == {
        "qwen3": "hermes",
        "qwen3_coder": "qwen3_coder",
        "llama3": "llama3_json",
        "mistral": "mistral",
        "deepseek": "deepseek_v31",
        "gpt_oss": "harmony",
        "glm": "glm45",
        "minimax": "minimax_m2",
    }


# Templates of ours: who writes so, the parser, whether it thinks beside calls.
OURS = {
    "deepseek_r1": (deepseek_v3, "deepseek_v3", True),
    "deepseek_v3": (deepseek_v3, "deepseek_v3", False),
    "deepseek_v31": (deepseek_v31, "deepseek_v31", False),
}


def test_our_templates_show_tools_and_what_a_model_wrote(tmp_path, subtests: pytest.Subtests) -> None:
    for name in OURS:
        with subtests.test(name):
            write, parser, thinks = OURS[name]
            directory = FORMATS["deepseek"].save(tmp_path / name)
            path = Path(text.__file__).parent / "templates" / f"{name}.jinja"
            (directory / "chat_template.jinja").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
            tokenizer = Tokenizer(str(directory))
            assert chosen(tokenizer) == (parser, "think")
            turns, reasoning = [Turn("system", "Be brief."), Turn("user", "What is it?")], "hm" * thinks
            for number in range(3):  # a loop: each prompt goes on where the answer before it ended
                prompt = tokenizer.render_template(turns, tools=[TOOL])
                assert "look_up" in prompt and "Be brief." in prompt
                called = tuple(AnswerCall(f"c{number}{n}", "look_up", '{"what": "ß"}') for n in range(2))
                turns.append(Turn("assistant", "", reasoning, called))
                answer = write(Answer("", reasoning, (("look_up", {"what": "ß"}),) * 2))
                answer = answer if number else answer.removeprefix("<think>\n" * thinks)
                turns += [Turn("tool", "A café", "", (), call.id, call.name) for call in called]
                assert tokenizer.render_template(turns, tools=[TOOL]).startswith(prompt + answer)
            turns += [Turn("assistant", "A café."), Turn("user", "And now?")]
            ends = tokenizer.render_template(turns, tools=[TOOL])[-40:]
            assert ends.endswith(
                "<think>\n" if thinks else "</think>" if name == "deepseek_v31" else "<｜Assistant｜>"
            )
            thinking = tokenizer.render_template(turns[:2], {"thinking": True})
            assert thinking.endswith("<think>") == (name == "deepseek_v31")
