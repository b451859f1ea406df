"""Prompts that end where the last message does are transformers' own, with past answers' ids in them."""

import pytest
from transformers import AutoTokenizer

from router.templates.formats import FORMATS
from services.router.text.rendered_chat import PastAnswer, render_chat
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, ToolCall

ASKED = ChatMessage(role="user", content="What is 6 x 7?")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {name: format_.save(tmp_path_factory.mktemp(name)) for name, format_ in FORMATS.items()}


def continued(*messages, **fields):
    return Chat(messages=messages, continue_final_message=True, **fields)


def said(content="", **fields):
    return ChatMessage(role="assistant", content=content, **fields)


def test_the_prompt_is_transformers_own(directories, subtests):
    for name, directory in directories.items():
        backend, tokenizer = AutoTokenizer.from_pretrained(directory), Tokenizer(str(directory))
        for content in ("It is", "It is ", "It is 4", "語 in\n\nlines"):
            with subtests.test(name, content=content):
                messages = [
                    {"role": "user", "content": ASKED.content},
                    {"role": "assistant", "content": content},
                ]
                text = backend.apply_chat_template(messages, tokenize=False, continue_final_message=True)
                assert text.rstrip().endswith(content.rstrip())
                chat = continued(ASKED, said(content))
                assert render_chat(tokenizer, chat).ids == tokenizer.encode(text, special_tokens=False)


def test_ids_that_were_generated_end_the_prompt_without_the_end_that_they_had(directories, subtests):
    for name, directory in directories.items():
        tokenizer = Tokenizer(str(directory))
        ids = by_letter(tokenizer, "It is")
        ended = [*ids, tokenizer.eos_token_ids[0]]
        begun = render_chat(tokenizer, Chat(messages=[ASKED])).ids
        for last, known, spliced in (
            (said("It is"), {1: PastAnswer(ended)}, {1}),
            (said("It is", token_ids=ended), {}, set()),
        ):
            with subtests.test(name, last=last):
                rendered = render_chat(tokenizer, continued(ASKED, last), known)
                assert rendered.ids == begun + ids
                assert rendered.spliced == spliced


def by_letter(tokenizer, text):
    return [token_id for letter in text for token_id in tokenizer.encode(letter, special_tokens=False)]


def test_past_answers_stand_in_it_as_they_were(directories, subtests):
    for name, directory in directories.items():
        with subtests.test(name):
            tokenizer = Tokenizer(str(directory))
            ids = by_letter(tokenizer, "42")
            past = said("42", token_ids=[*ids, tokenizer.eos_token_ids[0]])
            longer = [ASKED, past, ChatMessage(role="user", content="Sure?")]
            prompt = render_chat(tokenizer, continued(*longer, said("Yes, I"))).ids
            text = tokenizer.text_of(prompt)
            assert text.endswith("Yes, I") and text.count("42") == 1
            assert any(prompt[start : start + len(ids)] == ids for start in range(len(prompt)))


def test_what_cannot_go_on_is_refused_by_name(tmp_path, subtests):
    for messages, problem in [
        ([ASKED], "continue_final_message needs a last message of the assistant's"),
        ([ASKED, said()], r"messages\[1\].content must not be empty"),
        ([ASKED, said("a", tool_calls=[ToolCall(name="f")])], r"messages\[1\].tool_calls must be empty"),
    ]:
        with subtests.test(problem):
            tokenizer = Tokenizer(str(FORMATS["qwen3"].save(tmp_path)))
            with pytest.raises(InvalidRequest, match=rf"^chat\.{problem}"):
                render_chat(tokenizer, continued(*messages))

    directory = FORMATS["qwen3"].save(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest) as caught:
        render_chat(Tokenizer(str(directory)), continued(ASKED, said("Yes")))
    assert str(caught.value).startswith("chat.continue_final_message cannot be heeded")
    assert ASKED.content not in str(caught.value)
