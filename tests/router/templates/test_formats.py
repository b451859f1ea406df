"""The templates show a plain tool loop, and the text that models write is what they show of it."""

import pytest

from router.templates.formats import FORMATS, Call, Format, Said
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


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_model_writes_is_what_its_template_shows(name: str, tmp_path) -> None:
    format_ = FORMATS[name]
    said = Said(reasoning="So be it." * format_.thinks, calls=[Call("look_up", {"what": "ß", "n": 3})])
    tokenizer = Tokenizer(str(format_.save(tmp_path)))
    render = tokenizer._backend.apply_chat_template
    messages = _history(format_, said, as_string=name == "deepseek")
    asked = render(messages[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    whole = render(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert "look_up" in asked
    if name == "gpt_oss":  # whose history has the call's address elsewhere
        assert "<|channel|>analysis<|message|>So be it.<|end|>" in whole and "<|call|>" in whole
        return
    written = format_.written(said)
    assert whole.startswith(asked + written), (whole, asked + written)
    assert {tokenizer.token_text(i) for i in tokenizer.eos_token_ids} >= {format_.end}
    assert tokenizer.decode(tokenizer.encode("A café\n")) == "A café\n"
