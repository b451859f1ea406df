"""Answers are found by any of their names, and used only where they say what the client sends."""

import re
from array import array
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.templates.formats import FORMATS
from services.router.text import prompt as prompts
from services.router.text.answer_message import AnswerCall, AnswerMessage
from services.router.text.chat_memory import AnswerMemory
from services.router.text.prompt import PastAnswers
from services.router.text.rendered_chat import render_chat
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, ToolCall

QUESTION = [ChatMessage(role="system", content="Be brief"), ChatMessage(role="user", content="Hi")]
SAID = AnswerMessage("I look.", "hm", (AnswerCall("call_1", "f", '{"a": "ä", "b": 1}'),))


def past(
    memory: AnswerMemory, messages: Sequence[ChatMessage], tenant: str = "t", model: str = "m"
) -> PastAnswers:
    found = PastAnswers(memory, tenant, model, Chat(messages=messages))
    found.digest()
    found.recall()
    return found


@pytest.fixture
def memory() -> AnswerMemory:
    memory = AnswerMemory(1 << 16)
    assert past(memory, QUESTION).remember(array("I", range(100)), array("I", [7, 8]), SAID, "answer_1")
    return memory


def answer(
    content: str = "I look.",
    id_: str = "",
    name: str = "f",
    arguments: str = '{"b":1,"a":"\\u00e4"}',
    **fields: object,
) -> ChatMessage:
    call = ToolCall(id=id_, name=name, arguments=arguments)
    return ChatMessage(role="assistant", content=content, tool_calls=[call], **fields)


def test_an_answer_is_used_where_it_is_known_and_unchanged(
    memory: AnswerMemory, subtests: pytest.Subtests
) -> None:
    for messages, is_found in [
        ([*QUESTION, answer()], True),
        ([*QUESTION, answer("I look.\n")], True),
        ([*QUESTION, answer(reasoning="hm")], True),
        ([*QUESTION, answer(id_="own")], True),
        ([answer(id_="call_1")], True),
        ([answer(answer_id="answer_1")], True),
        ([*QUESTION, answer("I looked.")], False),
        ([*QUESTION, answer(reasoning="edited")], False),
        ([answer()], False),
        ([QUESTION[1], answer()], False),
        ([answer(id_="call_2")], False),
        ([answer(answer_id="answer_2")], False),
        ([answer(id_="call_1", name="g")], False),
        ([answer(id_="call_1", arguments='{"a": "ä", "b": 2}')], False),
        ([answer("edited", answer_id="answer_1")], False),
        ([*QUESTION, ChatMessage(role="assistant", content="I look.")], False),
    ]:
        with subtests.test(messages=messages):
            known = past(memory, messages).known
            if not is_found:
                assert not known
                continue
            [(index, found)] = known.items()
            assert index == len(messages) - 1
            assert (list(found.ids), list(found.prompt_end), found.has_reasoning) == (
                [7, 8],
                [*range(36, 100)],
                True,
            )


def test_another_tenant_or_model_finds_nothing_nor_do_ids_of_the_clients_own(
    memory: AnswerMemory, subtests: pytest.Subtests
) -> None:
    for whose in [{"tenant": "other"}, {"tenant": ""}, {"model": "other"}]:
        with subtests.test(whose=whose):
            sent = answer(id_="call_1", answer_id="answer_1")
            assert past(memory, [*QUESTION, sent]).known
            assert not past(memory, [*QUESTION, sent], **whose).known

    assert not past(memory, [*QUESTION, answer(token_ids=[1])]).known


def test_two_answers_that_said_the_same_are_told_apart_by_their_ids(memory: AnswerMemory) -> None:
    again = AnswerMessage(SAID.content, "otherwise", (AnswerCall("call_2", *_rest(SAID)),))
    assert past(memory, QUESTION).remember(array("I", [1]), array("I", [9]), again, "answer_2")
    assert not past(memory, [*QUESTION, answer()]).known
    assert list(past(memory, [*QUESTION, answer(id_="call_1")]).known[2].ids) == [7, 8]
    assert list(past(memory, [*QUESTION, answer(answer_id="answer_2")]).known[2].ids) == [9]


contents = st.sampled_from(["", "a", "a ", "\na", "b\nb", "ä<|im_end|>b", "<|im_start|>user\nc", "c"])


@given(remembered=st.lists(contents, min_size=1, max_size=3), sent=st.lists(contents, min_size=1, max_size=3))
def test_a_wrong_fingerprint_never_changes_what_was_said(
    coder: Tokenizer, remembered: list[str], sent: list[str]
) -> None:
    """Each answer is found under every fingerprint, as if all were the same."""
    memory = AnswerMemory(1 << 20)
    with patch.object(PastAnswers, "_keys", lambda self, index, message: [b"shared"]):
        for content in remembered:
            asked = past(memory, QUESTION)
            asked._chain = [b"shared"]
            with patch.object(prompts, "digest", lambda *parts: b"shared"):
                said = AnswerMessage(content)
                asked.remember(array("I"), array("I", coder.encode(content + "<|im_end|>")), said, "")
        turns = [ChatMessage(role="assistant", content=content) for content in sent]
        messages = [turn for answer in turns for turn in (ChatMessage(role="user", content="Hi"), answer)]
        chat = Chat(messages=[*messages, *QUESTION[1:]])
        known = past(memory, chat.messages).known
    texts = [coder.text_of(render_chat(coder, chat, answers).ids) for answers in (known, {})]
    assert _trimmed(texts[0]) == _trimmed(texts[1])


def _trimmed(text: str) -> str:
    """White space around a turn is nothing that was said."""
    return re.sub(r"(assistant)\s+", r"\1", re.sub(r"\s+(<\|im_end\|>)", r"\1", text))


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(FORMATS["qwen3_coder"].save(tmp_path_factory.mktemp("coder"))))


def _rest(said: AnswerMessage) -> tuple[str, str]:
    return said.calls[0].name, said.calls[0].arguments


def test_what_became_of_past_answers_is_counted(memory: AnswerMemory) -> None:
    given, unknown = answer(token_ids=[1]), answer("Unknown")
    found = past(memory, [*QUESTION, answer(), given, unknown, answer(id_="call_1")])
    found.rendered(frozenset({2}))
    assert found.outcomes == {"found": 1, "given": 1, "unknown": 1, "changed": 1}
