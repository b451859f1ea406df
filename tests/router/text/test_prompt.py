import threading

import pytest

from services.router.text.prompt import PromptEncoder, most_message_bytes
from services.router.text.tokenizer import Tokenizer
from services.values.errors import ContextExceeded, InvalidRequest
from services.wire.generation_messages import PackedIds
from services.wire.isthmus.v1.generation_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    TokenIds,
    Tool,
    ToolCall,
)


def chat(*messages: ChatMessage) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=messages))


@pytest.fixture
def encoder(character_tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(
        character_tokenizer, max_context_tokens=100, vocab_size=character_tokenizer.vocab_size
    )


async def test_a_bad_prompt_is_refused_by_name(encoder: PromptEncoder, subtests: pytest.Subtests) -> None:
    for request_, problem in [
        (GenerateRequest(), r"^prompt must be set"),
        (GenerateRequest(text=""), r"^text must not be empty"),
        (GenerateRequest(chat=Chat()), r"^chat\.messages must hold"),
        (GenerateRequest(token_ids=TokenIds()), r"^token_ids\.ids must hold"),
        (
            chat(ChatMessage(role="user", content="a", parts=["b"])),
            r"^chat\.messages\[0\]\.parts and its content",
        ),
        (GenerateRequest(text="a" * 150), r"^prompt .* 150 tokens.* 100 tokens"),
        (GenerateRequest(token_ids=TokenIds(ids=[1] * 100)), r"^prompt .* 100 tokens"),
        (chat(*[ChatMessage(role="user")] * 101), r"^prompt .* 101 messages"),
        (chat(ChatMessage(role="user", content="a" * 120)), r"^prompt .* tokens"),
        (
            GenerateRequest(token_ids=TokenIds(ids=[1, 2, 3, 128])),
            r"^token_ids\.ids\[3\] must be below .*128, got 128",
        ),
        (
            chat(ChatMessage(role="user"), ChatMessage(role="assistant", token_ids=[1, 4_000_000_000])),
            r"^chat\.messages\[1\]\.token_ids\[1\] must be below",
        ),
    ]:
        with subtests.test(problem), pytest.raises(InvalidRequest, match=problem):
            await encoder.encode(request_)

    short = PromptEncoder(Untouched(), max_context_tokens=100, vocab_size=10, max_text_bytes=10)
    ids = GenerateRequest(token_ids=TokenIds(ids=[1] * 100))
    for encodes, request in ((encoder, ids), (short, GenerateRequest(text="a" * 11))):
        with pytest.raises(ContextExceeded, match="This model's maximum context length is 100 tokens"):
            await encodes.encode(request)


async def test_each_kind_of_prompt_gives_its_ids(
    encoder: PromptEncoder, character_tokenizer: Tokenizer
) -> None:
    text = "<|user|>Hi<|end|>\n<|assistant|>"
    expected = tuple(character_tokenizer.encode(text))
    for request in (
        GenerateRequest(text=text),
        chat(ChatMessage(role="user", content="Hi")),
        GenerateRequest(token_ids=TokenIds(ids=expected)),
    ):
        assert tuple((await encoder.encode(request)).ids) == expected

    expected = character_tokenizer.encode("<|user|>Hi\nyou<|end|>\n<|assistant|>")
    assert list((await encoder.encode(chat(ChatMessage(role="user", parts=["Hi", "you"])))).ids) == expected
    alone = chat(ChatMessage(role="user", parts=["Hi"]))
    assert list((await encoder.encode(alone)).ids) == character_tokenizer.encode(
        "<|user|>Hi<|end|>\n<|assistant|>"
    )

    request = chat(ChatMessage(role="user", content="Hi"))
    request.chat.chat_template_kwargs = '{"enable_thinking": false}'
    expected = character_tokenizer.encode("<|user|>Hi<|end|>\n<|assistant|><no thinking>")
    assert list((await encoder.encode(request)).ids) == expected

    request = GenerateRequest(token_ids=TokenIds(ids=[127] * 99))
    assert len((await encoder.encode(request)).ids) == 99


async def test_special_tokens_are_added_to_a_text_unless_that_is_not_wanted(
    subtests: pytest.Subtests,
) -> None:
    for wanted, added in [(None, True), (True, True), (False, False)]:
        with subtests.test(wanted=wanted, added=added):

            class WithBos:
                eos_token_ids = ()

                def encode(self, text: str, special_tokens: bool = True) -> list[int]:
                    return [1] * special_tokens + [2]

                render_template = encode

            encoder = PromptEncoder(WithBos(), max_context_tokens=100, vocab_size=10)
            encoded = await encoder.encode(GenerateRequest(text="a", add_special_tokens=wanted))
            assert list(encoded.ids) == [1] * added + [2]


class Untouched:
    """This tokenizer must not be asked."""

    eos_token_ids = ()

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        raise AssertionError("tokenized")

    render_template = encode


def test_too_much_text_is_refused_before_it_is_tokenized(subtests: pytest.Subtests) -> None:
    for text in ["a" * 11, "語" * 4]:
        with subtests.test(text=text):
            encoder = PromptEncoder(Untouched(), max_context_tokens=100, vocab_size=10, max_text_bytes=10)
            for request, name in (
                (GenerateRequest(text=text), "text"),
                (
                    chat(ChatMessage(role="user", content=text[:2]), ChatMessage(content=text)),
                    "chat.messages",
                ),
                (chat(ChatMessage(role="user", parts=[text[:2], text])), "chat.messages"),
            ):
                with pytest.raises(InvalidRequest, match=f"^{name} must be at most 10 bytes"):
                    encoder.encode_now(request)

    for sent, name in [
        (Chat(messages=[ChatMessage(role="assistant", reasoning="a" * 11)]), "chat.messages"),
        (
            Chat(messages=[ChatMessage(tool_calls=[ToolCall(name="a" * 4, arguments="b" * 7)])]),
            "chat.messages",
        ),
        (Chat(messages=[ChatMessage(name="a" * 6, tool_call_id="b" * 5)]), "chat.messages"),
        (Chat(messages=[ChatMessage()], tools=[Tool(name="a", parameters="b" * 10)]), "chat.tools"),
        (Chat(messages=[ChatMessage()], tools=[Tool(description="語" * 4)]), "chat.tools"),
    ]:
        with subtests.test(sent=sent):
            encoder = PromptEncoder(Untouched(), max_context_tokens=100, vocab_size=10, max_text_bytes=10)
            with pytest.raises(ContextExceeded, match=f"^{name} must be at most 10 bytes"):
                encoder.encode_now(GenerateRequest(chat=sent))

    for sent in [
        Chat(messages=[ChatMessage()] * 50, tools=[Tool()] * 51),
        Chat(messages=[ChatMessage(tool_calls=[ToolCall()] * 100)]),
    ]:
        with subtests.test(sent=sent):
            encoder = PromptEncoder(Untouched(), max_context_tokens=100, vocab_size=10)
            with pytest.raises(ContextExceeded, match=r"101 messages, tools and calls"):
                encoder.encode_now(GenerateRequest(chat=sent))

    for max_context_tokens, limit in ((100, 1 << 20), (1 << 20, 16 << 20)):
        encoder = PromptEncoder(Untouched(), max_context_tokens, vocab_size=10)
        with pytest.raises(InvalidRequest, match=f"at most {limit} bytes"):
            encoder.encode_now(GenerateRequest(text="a" * (limit + 1)))


async def test_a_long_text_is_tokenized_off_the_loop(character_tokenizer: Tokenizer) -> None:
    class Observed:
        eos_token_ids = ()
        render_template = character_tokenizer.render_template
        arranged = character_tokenizer.arranged
        controls = None

        def encode(self, text: str, special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return character_tokenizer.encode(text, special_tokens)

    threads: list[threading.Thread] = []
    encoder = PromptEncoder(Observed(), max_context_tokens=100_000, vocab_size=128)
    for text in ("short", "long" * 2000):
        encoded = await encoder.encode(GenerateRequest(text=text))
        assert list(encoded.ids) == character_tokenizer.encode(text)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_message_may_be_what_the_context_can_need():
    mib = 1 << 20
    wanted = {None: 8, 4096: 3, 65_536: 3, 131_072: 5, 1 << 20: 33, 1 << 30: 64}
    assert {context: most_message_bytes(context, 128_000) // mib for context in wanted} == wanted


async def test_what_is_too_long_is_refused_before_it_is_taken_out_or_digested(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedIds, "from_proto", lambda _: pytest.fail("they take many times their bytes"))
    with pytest.raises(ContextExceeded, match="it has 100 tokens"):
        encoder.encode_now(GenerateRequest(token_ids=TokenIds(ids=[1] * 100)))

    class NeverDigested:
        def digest(self):
            raise AssertionError("it was digested")

    encoder = PromptEncoder(Untouched(), max_context_tokens=100, vocab_size=10, max_text_bytes=10)
    for messages in ([ChatMessage(content="a" * 11)], [ChatMessage()] * 101):
        request = GenerateRequest(chat=Chat(messages=messages))
        with pytest.raises(ContextExceeded):
            await encoder.encode(request, NeverDigested())
