import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.templates.formats import FORMATS
from services.router.parsing.answer_formats import CALL_TEXTS
from services.router.text import splices
from services.router.text.chat_memory import drift_tokens
from services.router.text.chat_turns import ChatTurns, Turn
from services.router.text.rendered_chat import PastAnswer, render_chat
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, ToolCall

Variables = Mapping[str, Any]


def prompt_of(tokenizer: Any, messages: Sequence[ChatMessage], variables: str = "") -> list[int]:
    return render_chat(tokenizer, Chat(messages=messages, chat_template_kwargs=variables)).ids


class Plain:
    """This tokenizer is of characters, without special ones. Its template writes the contents one after the
    other."""

    eos_token_ids: tuple[int, ...] = ()
    keeps_past_reasoning = False
    controls = None

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [1] * len(text)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "\x00" * len(token_ids)

    def is_silent(self, token_id: int) -> bool:
        return False

    def shows_call_ids(self, tools: Any) -> bool:
        return False

    def arranged(self, chat: ChatTurns, call_text: Any = None) -> ChatTurns:
        return chat

    def render_template(
        self, turns: Sequence[Turn], variables: Variables, tools: Any = (), *, generation_prompt: bool = True
    ) -> str:
        return "".join(str(turn.content) for turn in turns)


texts = st.text(alphabet="ab IS<|>\n語x0y", max_size=8)
turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=6
)


def plain_encoding(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    rendered = tokenizer.render_template([Turn(m.role, m.content) for m in messages])
    return tokenizer.encode(rendered, special_tokens=False)


@given(turns=turns)
def test_a_chat_is_the_encoded_template(character_tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> None:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    assert prompt_of(character_tokenizer, messages) == plain_encoding(character_tokenizer, messages)
    # Ids that encode the content change nothing.
    with_ids = [ChatMessage(role=m.role, content=m.content) for m in messages]
    for message in with_ids:
        if message.role == "assistant":
            message.token_ids.extend(character_tokenizer.encode(message.content))
            message.content = "what stands here is not read" if message.token_ids else ""
    assert prompt_of(character_tokenizer, with_ids) == plain_encoding(character_tokenizer, messages)


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
    assert prompt_of(character_tokenizer, messages) == encoded[0] + ids + encoded[1] + ids + encoded[2]


def test_the_next_turn_begins_with_the_ids_of_the_last_one(character_tokenizer: Tokenizer) -> None:
    first = [ChatMessage(role="user", content="Hi")]
    prompt = prompt_of(character_tokenizer, first)
    output = [9, 9, 0, *character_tokenizer.eos_token_ids[-1:]]
    second = [
        *first,
        ChatMessage(role="assistant", content="who knows", token_ids=output),
        ChatMessage(role="user", content="And?"),
    ]
    next_prompt = prompt_of(character_tokenizer, second)
    assert next_prompt[: len(prompt) + len(output)] == prompt + output
    assert drift_tokens(prompt + output, next_prompt) == 0
    # The end marker that was generated is not followed by the template's own.
    [newline] = character_tokenizer.encode("\n")
    assert next_prompt[len(prompt) + len(output)] == newline


def test_another_end_of_sequence_gives_way_to_the_templates_own_if_there_is_one(
    character_tokenizer: Tokenizer,
) -> None:
    other_eos = 101  # stated by config.json; the template writes <|end|>
    assert other_eos in character_tokenizer.eos_token_ids
    message = ChatMessage(role="assistant", token_ids=[9, other_eos])
    without = ChatMessage(role="assistant", token_ids=[9])
    assert prompt_of(character_tokenizer, [message]) == prompt_of(character_tokenizer, [without])

    class OpenEnded(Plain):
        eos_token_ids = (9,)

        def render_template(self, turns: Sequence[Turn], *args: Any, **prompts: bool) -> str:
            return "".join(f"{turn.content}\n" for turn in turns)

    assert prompt_of(OpenEnded(), [ChatMessage(role="assistant", token_ids=[5, 9])]) == [5, 9, 1]


def test_a_bad_chat_is_refused_by_name(character_tokenizer: Tokenizer, subtests: pytest.Subtests) -> None:
    for messages, problem in [
        ([], r"^chat\.messages must hold"),
        ([("user", ""), ("user", ""), ("robot", "")], r"^chat\.messages\[2\]\.role must be one of .*'robot'"),
        ([("", "Hi")], r"^chat\.messages\[0\]\.role"),
        ([("user", "forbidden")], r"^chat\.messages are refused .*no such talk"),
    ]:
        with subtests.test(problem), pytest.raises(InvalidRequest, match=problem):
            prompt_of(character_tokenizer, [ChatMessage(role=role, content=text) for role, text in messages])

    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[0\]\.token_ids may only"):
        prompt_of(character_tokenizer, [ChatMessage(role="user", token_ids=[1])])


HI = [ChatMessage(role="user", content="Hi")]


def test_variables_and_a_developers_turn_reach_the_template(character_tokenizer: Tokenizer) -> None:
    chats = [[ChatMessage(role=role, content="Be brief")] for role in ("developer", "system")]
    assert prompt_of(character_tokenizer, chats[0]) == prompt_of(character_tokenizer, chats[1])

    plain = prompt_of(character_tokenizer, HI)
    for variables, more in (
        ("{}", ""),
        ('{"enable_thinking": true}', ""),
        ('{"enable_thinking": false}', "<no thinking>"),
        ('{"level": 1000}', "<1000>"),
        ('{"level": "hoch", "unknown": [{}]}', "<hoch>"),
    ):
        ids = prompt_of(character_tokenizer, HI, variables)
        assert ids == plain + character_tokenizer.encode(more)


def test_bad_variables_are_refused_by_name(character_tokenizer: Tokenizer, subtests: pytest.Subtests) -> None:
    for variables in [
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
    ]:
        refused = pytest.raises(InvalidRequest, match=r"^chat\.chat_template_kwargs must")
        with subtests.test(variables=variables), refused:
            prompt_of(character_tokenizer, HI, variables)

    with pytest.raises(InvalidRequest, match=r"refused by the model's chat template"):
        prompt_of(character_tokenizer, HI, '{"divisor": 0}')


class Recorder(Plain):
    """It keeps the longest content."""

    def __init__(self) -> None:
        self.longest = 0

    def render_template(self, turns: Sequence[Turn], *args: Any, **prompts: bool) -> str:
        self.longest = max(self.longest, *(len(turn.content) for turn in turns))
        return super().render_template(turns, {})


def test_no_text_makes_the_sentinels_long() -> None:
    """One that grew until no message held it took minutes for a message made to fit it."""
    recorder = Recorder()
    text = "ISTHMUS" + "x" * 2_000
    messages = [ChatMessage(role="user", content=text), ChatMessage(role="assistant", token_ids=[2])]
    assert prompt_of(recorder, messages) == [*[1] * len(text), 2]
    assert recorder.longest == len(text)


def test_the_template_is_searched_once_for_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searching once for each took minutes for a request's worth of short turns."""
    searches = []
    search = splices.re.finditer
    monkeypatch.setattr(splices.re, "finditer", lambda *args: searches.append(1) or search(*args))
    messages = [ChatMessage(role="assistant", token_ids=[index]) for index in range(2, 500)]
    assert prompt_of(Recorder(), messages) == list(range(2, 500))
    assert len(searches) <= 5  # of the chat, and twice of what frames answers behind a user and another


def test_what_a_template_leaves_out_is_refused_by_name() -> None:
    class Forgetful(Plain):
        """It writes no tool's turn, and quotes of all others what is not plain."""

        def render_template(self, turns: Sequence[Turn], *args: Any, **prompts: bool) -> str:
            return "".join(str(turn.content).replace("'", "`") for turn in turns if turn.role != "tool")

    said = [ChatMessage(role="user", content="It's"), ChatMessage(role="assistant", content="so")]
    assert len(prompt_of(Forgetful(), said)) == 6
    with pytest.raises(
        InvalidRequest, match=r"^chat\.messages\[1\]\.content cannot be used: .* does not show"
    ):
        prompt_of(Forgetful(), [said[0], ChatMessage(role="tool", content="7"), said[1]])


def test_answers_that_a_template_leaves_out_doubles_turns_around_or_joins_take_no_ids(
    subtests: pytest.Subtests,
) -> None:
    class Odd(Plain):
        def __init__(self, written: int) -> None:
            self.written = written

        def render_template(self, turns: Sequence[Turn], *args: Any, **prompts: bool) -> str:
            return "|".join([str(turns[0].content)] * self.written)

    for written in (0, 2):
        refused = pytest.raises(InvalidRequest, match=r"^chat\.messages\[0\]\.token_ids cannot be used")
        with subtests.test(written=written), refused:
            prompt_of(Odd(written), [ChatMessage(role="assistant", token_ids=[1])])

    class Backwards(Recorder):
        def render_template(self, turns: Sequence[Turn], *args: Any, **prompts: bool) -> str:
            return super().render_template(turns[::-1])

    messages = [ChatMessage(role="assistant", token_ids=[1]) for _ in range(2)]
    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[0\]\.token_ids cannot be used"):
        prompt_of(Backwards(), messages)

    class Joining(Plain):
        def arranged(self, chat: ChatTurns, call_text: Any = None) -> ChatTurns:
            return replace(chat, turns=[chat.turns[0]], origins=[(0, 1)])

    answers = [ChatMessage(role="assistant", content="a"), ChatMessage(role="assistant", token_ids=[1])]
    refusal = r"^chat\.messages\[1\]\.token_ids cannot be used: .* only joined with another one"
    with pytest.raises(InvalidRequest, match=refusal):
        prompt_of(Joining(), answers)


def test_calls_that_a_template_has_no_place_for_are_content(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    tokenizer = Tokenizer(str(FORMATS["qwen3"].save(tmp_path)))
    shows_no_calls = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer._backend.chat_template = shows_no_calls
    tokenizer._backend.save_pretrained(tmp_path / "plain")
    tokenizer = Tokenizer(str(tmp_path / "plain"))
    call = ToolCall(id="a", name="f", arguments='{"x": 1}')
    messages = [
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content="I look.", tool_calls=[call]),
        ChatMessage(role="tool", content="7", tool_call_id="a"),
    ]
    ids = render_chat(tokenizer, Chat(messages=messages), call_text=CALL_TEXTS["hermes"]).ids
    said = 'I look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>tool\n7" in tokenizer.text_of(ids)
    answer = PastAnswer(tokenizer.encode(said.replace(": ", ":"), special_tokens=False))
    rendered = render_chat(tokenizer, Chat(messages=messages), {1: answer}, call_text=CALL_TEXTS["hermes"])
    assert rendered.spliced == {1} and '{"x":1}' in tokenizer.text_of(rendered.ids)
    with pytest.raises(InvalidRequest, match=r"^chat\.messages\[1\]\.tool_calls cannot be used"):
        render_chat(tokenizer, Chat(messages=messages))
