import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.chats import chat
from services.router.text.chats.chat import render_chat
from services.router.text.chats.conversations import drift_tokens
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import ChatMessage

Variables = Mapping[str, Any]
texts = st.text(alphabet="ab IS<|>\n語x0y", max_size=8)
turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=6
)


def plain_encoding(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    rendered = tokenizer.render_template([{"role": m.role, "content": m.content} for m in messages])
    return tokenizer.encode(rendered, special_tokens=False)


@given(turns=turns)
def test_a_chat_is_the_encoded_template(character_tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> None:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    assert render_chat(character_tokenizer, messages) == plain_encoding(character_tokenizer, messages)


@given(turns=turns)
def test_ids_that_encode_the_content_change_nothing(
    character_tokenizer: Tokenizer, turns: list[tuple[str, str]]
) -> None:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    with_ids = [ChatMessage(role=m.role, content=m.content) for m in messages]
    for message in with_ids:
        if message.role == "assistant":
            message.token_ids.extend(character_tokenizer.encode(message.content))
            message.content = "what stands here is not read" if message.token_ids else ""
    assert render_chat(character_tokenizer, with_ids) == plain_encoding(character_tokenizer, messages)


def test_ids_stand_as_they_are_though_their_text_encodes_otherwise(character_tokenizer: Tokenizer) -> None:
    ids = [0, 5, 0, 0]  # no text encodes to these: 0 is <unk>
    messages = [
        ChatMessage(role="user", content="ISTHMUSx1y"),
        ChatMessage(role="assistant", content="??", token_ids=ids),
        ChatMessage(role="assistant", content="!!", token_ids=ids),
    ]
    before, between, after = (
        "<|user|>ISTHMUSx1y<|end|>\n<|assistant|>",
        "<|end|>\n<|assistant|>",
        "<|end|>\n<|assistant|>",
    )
    encoded = [character_tokenizer.encode(text) for text in (before, between, after)]
    assert render_chat(character_tokenizer, messages) == encoded[0] + ids + encoded[1] + ids + encoded[2]


def test_the_next_turn_begins_with_the_ids_of_the_last_one(character_tokenizer: Tokenizer) -> None:
    first = [ChatMessage(role="user", content="Hi")]
    prompt = render_chat(character_tokenizer, first)
    output = [9, 9, 0, *character_tokenizer.eos_token_ids[-1:]]
    second = [
        *first,
        ChatMessage(role="assistant", content="who knows", token_ids=output),
        ChatMessage(role="user", content="And?"),
    ]
    next_prompt = render_chat(character_tokenizer, second)
    assert next_prompt[: len(prompt) + len(output)] == prompt + output
    assert drift_tokens(prompt + output, next_prompt) == 0
    # The end marker that was generated is not followed by the template's own.
    [newline] = character_tokenizer.encode("\n")
    assert next_prompt[len(prompt) + len(output)] == newline


def test_another_end_of_sequence_gives_way_to_the_templates_own(character_tokenizer: Tokenizer) -> None:
    other_eos = 101  # stated by config.json; the template writes <|end|>
    assert other_eos in character_tokenizer.eos_token_ids
    message = ChatMessage(role="assistant", token_ids=[9, other_eos])
    without = ChatMessage(role="assistant", token_ids=[9])
    assert render_chat(character_tokenizer, [message]) == render_chat(character_tokenizer, [without])


def test_an_end_of_sequence_stays_where_the_template_writes_none() -> None:
    class OpenEnded:
        eos_token_ids = (9,)

        def encode(self, text: str, special_tokens: bool = True) -> list[int]:
            return [1] * len(text)

        def render_template(self, messages: Sequence[dict[str, str]], variables: Variables) -> str:
            return "".join(message["content"] + "\n" for message in messages)

    assert render_chat(OpenEnded(), [ChatMessage(role="assistant", token_ids=[5, 9])]) == [5, 9, 1]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], r"^chat\.messages must hold"),
        ([("user", ""), ("user", ""), ("robot", "")], r"^chat\.messages\[2\]\.role must be one of .*'robot'"),
        ([("", "Hi")], r"^chat\.messages\[0\]\.role"),
        ([("user", "forbidden")], r"^chat\.messages are refused .*no such talk"),
    ],
)
def test_a_bad_chat_is_refused_by_name(
    character_tokenizer: Tokenizer, messages: list[tuple[str, str]], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        render_chat(character_tokenizer, [ChatMessage(role=role, content=text) for role, text in messages])


def test_a_developer_may_speak(character_tokenizer: Tokenizer) -> None:
    chats = [[ChatMessage(role=role, content="Be brief")] for role in ("developer", "system")]
    assert render_chat(character_tokenizer, chats[0]) == render_chat(character_tokenizer, chats[1])


def test_ids_are_for_assistants_only(character_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[0\]\.token_ids may only"):
        render_chat(character_tokenizer, [ChatMessage(role="user", token_ids=[1])])


@pytest.mark.parametrize("written", [0, 2])
def test_a_template_that_leaves_out_or_doubles_a_turn_takes_no_ids(
    character_tokenizer: Tokenizer, written: int
) -> None:
    class Odd:
        eos_token_ids = ()
        encode = character_tokenizer.encode

        def render_template(self, messages: Sequence[dict[str, str]], variables: Variables) -> str:
            return "|".join([messages[0]["content"]] * written)

    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[0\]\.token_ids cannot be used"):
        render_chat(Odd(), [ChatMessage(role="assistant", token_ids=[1])])


HI = [ChatMessage(role="user", content="Hi")]


def test_variables_reach_the_template(character_tokenizer: Tokenizer) -> None:
    plain = render_chat(character_tokenizer, HI)
    for variables, more in (
        ("{}", ""),
        ('{"enable_thinking": true}', ""),
        ('{"enable_thinking": false}', "<no thinking>"),
        ('{"level": 1000}', "<1000>"),
        ('{"level": "hoch", "unknown": [{}]}', "<hoch>"),
    ):
        ids = render_chat(character_tokenizer, HI, variables)
        assert ids == plain + character_tokenizer.encode(more)


@pytest.mark.parametrize(
    "variables",
    [
        "{",
        "[]",
        "5",
        "[" * 4000,
        json.dumps({"level": "\ud800"}),
        json.dumps({"a": "x" * 4096}),
        json.dumps({"a": "語" * 1400}, ensure_ascii=False),
        *(json.dumps({name: "x"}) for name in ("chat_template", "tools", "documents", "tokenize", "self")),
        *(json.dumps({name: "x"}) for name in ("messages", "conversations", "conversation", "max_length")),
        '{"add_generation_prompt": false}',
        '{"tokenizer_kwargs": {}}',
    ],
)
def test_bad_variables_are_refused_by_name(character_tokenizer: Tokenizer, variables: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat\.chat_template_kwargs must"):
        render_chat(character_tokenizer, HI, variables)


def test_a_template_that_fails_on_a_variable_refuses_it(character_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"refused by the model's chat template"):
        render_chat(character_tokenizer, HI, '{"divisor": 0}')


class Recorder:
    """Writes the contents one after the other, and keeps the longest."""

    eos_token_ids = ()

    def __init__(self) -> None:
        self.longest = 0

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [1] * len(text)

    def render_template(self, messages: Sequence[dict[str, str]], variables: Variables) -> str:
        contents = [message["content"] for message in messages]
        self.longest = max(map(len, contents))
        return "".join(contents)


def test_no_text_makes_the_sentinels_long() -> None:
    """One that grew until no message held it took minutes for a message made to fit it."""
    recorder = Recorder()
    text = "ISTHMUS" + "x" * 2_000
    messages = [ChatMessage(role="user", content=text), ChatMessage(role="assistant", token_ids=[2])]
    assert render_chat(recorder, messages) == [*[1] * len(text), 2]
    assert recorder.longest == len(text)


def test_the_template_is_searched_once_for_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each was minutes for a request's worth of short turns."""
    searches = []
    split = chat.re.split
    monkeypatch.setattr(chat.re, "split", lambda *args: searches.append(1) or split(*args))
    messages = [ChatMessage(role="assistant", token_ids=[index]) for index in range(2, 500)]
    assert render_chat(Recorder(), messages) == list(range(2, 500))
    assert len(searches) == 1


def test_a_template_that_turns_turns_around_takes_no_ids() -> None:
    class Backwards(Recorder):
        def render_template(self, messages: Sequence[dict[str, str]], variables: Variables) -> str:
            return super().render_template(messages[::-1], variables)

    messages = [ChatMessage(role="assistant", token_ids=[1]) for _ in range(2)]
    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[0\]\.token_ids cannot be used"):
        render_chat(Backwards(), messages)
