"""Families of models, each by its own template and tokens: what is read is what was said."""

import json
import re
from dataclasses import replace

import pytest

from router.parsing.written import WRITERS, Answer
from router.templates.formats import FORMATS, Call, Said
from services.router.parsing.parser_choice import ParserChoice, choose
from services.router.request.client_request import CallMode, ChatTools
from services.router.request.parsers import Parsers
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.values.request import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, GenerateRequest, Tool

CHOSEN = {
    "qwen3": ("hermes", "think"),
    "qwen3_coder": ("qwen3_coder", "none"),
    "llama3": ("llama3_json", "none"),
    "mistral": ("mistral", "none"),
    "deepseek": ("deepseek_v31", "think"),
    "gpt_oss": ("harmony", "harmony"),
    "glm": ("glm45", "think"),
    "minimax": ("minimax_m2", "think"),
}
SCHEMAS = {"look_up": {"type": "object", "properties": {"n": {"type": "integer"}}}}
LOOK_UP = {"name": "look_up", "description": "", "parameters": SCHEMAS["look_up"]}
ONE, TWO = Call("look_up", {"what": "ß </tool_call> <|call|>", "n": 3}), Call("look_up", {})
PLAIN = Call("look_up", {"what": "ß <think>", "n": 3})  # tags end what is written between tags


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """(its format, its tokenizer) of each"""
    return [
        (format_, Tokenizer(str(format_.save(tmp_path_factory.mktemp(format_.name)))))
        for format_ in FORMATS.values()
    ]


def parsers_of(tokenizer):
    choice = choose("auto", "auto", tokenizer.chat_template, tokenizer.response_template)
    return choice, Parsers(tokenizer, choice)


def sayings(format_):
    one = PLAIN if format_.name in ("qwen3_coder", "glm", "minimax") else ONE
    thought = "So be it." * format_.thinks
    yield Said("It is a café 👋.", thought)
    yield Said("", thought, [one])
    if format_.name != "llama3":
        yield Said("I look.", thought, [one])
    if format_.parallel:
        yield Said("", thought, [one, TWO, one])


def read(format_, tokenizer, said, step):
    tools = ChatTools(SCHEMAS, parsed=True)
    messages = [{"role": "user", "content": "What is it? <think>"}]
    prompt = tokenizer._backend.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": LOOK_UP}],
        tokenize=False,
        add_generation_prompt=True,
    )
    _, parsers = parsers_of(tokenizer)
    text = parsers.text_of(tools, SamplingParams(), tokenizer.encode(prompt, special_tokens=False))
    *ids, end = tokenizer.encode(format_.written(said), special_tokens=False)
    assert end in parsers.end_ids(tools)
    for begin in range(0, len(ids), step):
        text.push(ids[begin : begin + step])
    text.finish()
    return text


def test_a_template_tells_how_its_model_writes_and_what_was_said_is_read_from_its_tokens(families, subtests):
    for format_, tokenizer in families:
        with subtests.test(family=format_.name):
            choice, _ = parsers_of(tokenizer)
            assert (choice.tools, choice.reasoning) == CHOSEN[format_.name]
        for step in [1, 7]:
            with subtests.test(family=format_.name, step=step):
                for said in sayings(format_):
                    text = read(format_, tokenizer, said, step)
                    message = text.message()
                    calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
                    assert (message.content.strip(), message.reasoning) == (said.content, said.reasoning)
                    assert calls == [(call.name, dict(call.arguments)) for call in said.calls]
                    assert (text.reasoning_tokens > 0) == bool(said.reasoning) and text.num_broken == 0


def test_the_end_of_a_harmony_call_ends_an_answer_that_may_call(tmp_path):
    tokenizer = Tokenizer(str(FORMATS["gpt_oss"].save(tmp_path)))
    (tmp_path / "generation_config.json").unlink()
    tokenizer = Tokenizer(str(tmp_path))
    _, parsers = parsers_of(tokenizer)
    call = next(token_id for token_id, text in tokenizer.special_tokens.items() if text == "<|call|>")
    assert parsers.end_ids(ChatTools(SCHEMAS)) == (*tokenizer.eos_token_ids, call)
    assert parsers.end_ids(ChatTools()) == tokenizer.eos_token_ids
    assert parsers.end_ids(ChatTools(SCHEMAS, CallMode.NONE)) == tokenizer.eos_token_ids


def test_without_parsers_an_answer_is_decoded_as_ever(character_tokenizer):
    parsers = Parsers(character_tokenizer, ParserChoice())
    text = parsers.text_of(ChatTools(parsed=True), SamplingParams(), [1])
    assert text._parser is None
    assert text._detokenizer._tokenizer is character_tokenizer


SPECIAL = re.compile(r"""<\|[\w"]+\|?>|<\w+\|>|｜DSML｜|]<]minimax\[>\[""")


def test_markers_that_are_special_tokens_or_have_some_in_them(tmp_path):
    """Whatever of them are: the other special tokens of an answer are no text."""
    answer = Answer("It is.", "So be it.", (("look_up", {"what": "ß", "n": 3}), ("look_up", {})))
    for name, write, reasoning in WRITERS:
        written = write(answer)
        special = set(SPECIAL.findall(written))
        if name in ("harmony", "template") or not special:
            continue
        format_ = replace(FORMATS["qwen3"], special=" ".join(["<|im_end|>", "<|other|>", *sorted(special)]))
        tokenizer = Tokenizer(str(format_.save(tmp_path / name)))
        parsers = Parsers(tokenizer, choose(name, reasoning, "", None))
        text = parsers.text_of(ChatTools(SCHEMAS, parsed=True), SamplingParams(), [1])
        for token_id in tokenizer.encode(written + "<|other|>", special_tokens=False):
            text.push([token_id])
        text.finish()
        message = text.message()
        assert (message.content.strip(), message.reasoning) == (answer.content, answer.reasoning), name
        calls = tuple((call.name, json.loads(call.arguments)) for call in message.calls)
        assert calls == answer.calls, name


def test_a_template_without_tools_is_not_told_to_set_what_cannot_help(character_model):
    tokenizer = Tokenizer(str(character_model))
    assert not tokenizer.shows_tools
    request = GenerateRequest(chat=Chat(tools=[Tool(name="look_up")]))
    with pytest.raises(InvalidRequest, match="shows no tools; a model is needed") as refusal:
        Parsers(tokenizer, ParserChoice()).read_tools(request)
    assert "tool_choice" not in str(refusal.value) and "raw_answer" not in str(refusal.value)
