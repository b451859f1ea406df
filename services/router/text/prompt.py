"""A request's prompt becomes ids, whichever way the client gave it."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np

from services.router.text.chats.past_answers import PastAnswers
from services.router.text.chats.rendered_chat import NO_ANSWERS, CallText, ChatTokenizer, render_chat
from services.values.errors import ContextExceeded, InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat, GenerateRequest
from services.wire.packed_ids import PackedIds

_Result = TypeVar("_Result")

# A serialized request has so many bytes; every stream on the loop would feel the encoding of a longer one.
_LONG_REQUEST = 4096
# Fewer take less than the 5 ms for which a thread would keep the loop from running, too.
_MANY_IDS = 1 << 16

_IDS_NAME = "token_ids.ids"


_TOKEN_BYTES = 16  # in no language do tokens have half of it on average
_LEAST_TEXT_BYTES = 1 << 20
_BESIDE_PROMPT_BYTES = 1 << 20  # schemas, variables, biases and names need no more
_MOST_MESSAGE_BYTES = 64 << 20  # the ranks' own messages have no more
_UNKNOWN_CONTEXT_MESSAGE_BYTES = 8 << 20


def most_text_bytes(context_tokens: int) -> int:
    """Return how many bytes of UTF-8 may become tokens of one context; that is far more than it can hold."""
    return max(_LEAST_TEXT_BYTES, _TOKEN_BYTES * context_tokens)


def most_message_bytes(context_tokens: int | None, vocab_size: int) -> int:
    """Return how many bytes a client's message may have, in protobuf or JSON: what the model's context can
    need.

    A prompt is text, every second byte of which JSON may escape, or ids in decimal with a comma and a space
    each. Beside it there is a mebibyte for all else: of 4,096 tokens 3 MiB in all, of 131,072 5 MiB, of
    1,048,576 33 MiB. Where config.json states no context (None) it is 8 MiB.
    """
    if context_tokens is None:
        return _UNKNOWN_CONTEXT_MESSAGE_BYTES
    ids_bytes = (len(str(vocab_size)) + 2) * context_tokens
    prompt_bytes = max(2 * most_text_bytes(context_tokens), ids_bytes)
    return min(prompt_bytes + _BESIDE_PROMPT_BYTES, _MOST_MESSAGE_BYTES)


class PromptEncoder:
    """Text, chats or ids go in; ids come out.

    `max_context_tokens` bounds prompt and output together. `max_text_bytes` (UTF-8) refuses a text before the
    work of tokenizing it; unset, it is far above what any context holds. `call_text` writes past calls as the
    model writes them, for chat templates that have no place for them.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        max_context_tokens: int,
        vocab_size: int,
        max_text_bytes: int | None = None,
        *,
        keep_thinking: bool = False,
        call_text: CallText | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._max_text_bytes = max_text_bytes or most_text_bytes(max_context_tokens)
        self._keep_thinking = keep_thinking
        self._call_text = call_text

    async def encode(self, request: GenerateRequest, past: PastAnswers | None = None) -> PackedIds:
        """Encode as `encode_now` does, a long request in a thread. A chat's past answers are looked up in
        `past`."""
        is_long = _is_long(request)
        if past is not None:
            await _do(is_long, partial(self._digest, request.chat, past))
            past.recall()
        return await _do(is_long, partial(self.encode_now, request, past))

    def _digest(self, chat: Chat, past: PastAnswers) -> None:
        self._check_chat(chat)  # a chat that is refused for its length needs no digests
        past.digest()

    def check(self, given: PackedIds) -> PackedIds:
        self._check_prompt(given, _IDS_NAME)
        return given

    def encode_now(self, request: GenerateRequest, past: PastAnswers | None = None) -> PackedIds:
        """Return at least one id, every one in the vocabulary, with room for one more token in the context.

        Raises:
            ContextExceeded: The context cannot hold the prompt.
            InvalidRequest: There is no prompt, or an empty one, or an id that is not in the vocabulary, or
                the template refuses the chat; the message begins with the field.
        """
        name = _IDS_NAME if request.HasField("token_ids") else "prompt"
        match request.WhichOneof("prompt"):
            case "text":
                special = request.add_special_tokens or not request.HasField("add_special_tokens")
                prompt = PackedIds.of(self._encode_text(request.text, special))
            case "chat":
                prompt = PackedIds.of(self._encode_chat(request.chat, past))
            case "token_ids":
                self._check_len(
                    len(request.token_ids.ids), name
                )  # taken out, they would take many times their bytes
                prompt = PackedIds.from_proto(request.token_ids)
            case _:
                raise InvalidRequest("prompt", "must be set: one of text, chat and token_ids")
        self._check_prompt(prompt, name)
        return prompt

    def _check_prompt(self, prompt: PackedIds, name: str) -> None:
        self._check_len(len(prompt.ids), name)
        self._check_ids(prompt.ids, name)

    def _encode_text(self, text: str, special_tokens: bool) -> list[int]:
        if not text:
            raise InvalidRequest("text", "must not be empty")
        self._check_bytes([text], "text")
        return self._tokenizer.encode(text, special_tokens)

    def _check_chat(self, chat: Chat) -> None:
        # A message is at least one token; a request's worth of empty ones would keep the template busy.
        num_parts = len(chat.messages) + len(chat.tools) + sum(len(each.tool_calls) for each in chat.messages)
        if num_parts > self._max_context_tokens:
            self._refuse_len(f"{num_parts} messages, tools and calls")
        self._check_bytes(_texts_of_messages(chat), "chat.messages")
        self._check_bytes(_texts_of_tools(chat), "chat.tools")

    def _encode_chat(self, chat: Chat, past: PastAnswers | None) -> list[int]:
        if past is None:  # with past answers it was checked before
            self._check_chat(chat)
        for index, message in enumerate(chat.messages):
            self._check_ids(array("I", message.token_ids), f"chat.messages[{index}].token_ids")
        known = past.known if past is not None else NO_ANSWERS
        rendered = render_chat(
            self._tokenizer, chat, known, keep_thinking=self._keep_thinking, call_text=self._call_text
        )
        if past is not None:
            past.rendered(rendered.spliced)
        return rendered.ids

    def _check_bytes(self, texts: Iterable[str], name: str) -> None:
        size_bytes = sum(len(text.encode()) for text in texts)
        if size_bytes > self._max_text_bytes:
            raise ContextExceeded(
                name,
                f"must be at most {self._max_text_bytes} bytes of text, got {size_bytes} bytes. "
                + self._limit(),
            )

    def _check_len(self, num_tokens: int, name: str) -> None:
        if num_tokens == 0:
            raise InvalidRequest(name, "must hold at least one token")
        if num_tokens >= self._max_context_tokens:
            self._refuse_len(f"{num_tokens} tokens")

    def _refuse_len(self, length: str) -> NoReturn:
        raise ContextExceeded(f"prompt is too long: it has {length}. {self._limit()}")

    def _limit(self) -> str:
        # Many a client that knows no code knows by OpenAI's words that a context is full.
        return (
            f"This model's maximum context length is {self._max_context_tokens} tokens, "
            "prompt and output together"
        )

    def _check_ids(self, ids: "array[int]", name: str) -> None:
        if np.frombuffer(ids, np.uint32).max(initial=0) < self._vocab_size:
            return
        for index, token_id in enumerate(ids):
            if token_id >= self._vocab_size:
                raise InvalidRequest(
                    f"{name}[{index}]",
                    f"must be below the vocabulary's size {self._vocab_size}, got {token_id}",
                )


def _texts_of_messages(chat: Chat) -> Iterator[str]:
    for message in chat.messages:
        yield from (message.content, *message.parts, message.reasoning, message.name, message.tool_call_id)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)


def _texts_of_tools(chat: Chat) -> Iterator[str]:
    for tool in chat.tools:
        yield from (tool.name, tool.description, tool.parameters)


async def _do(in_thread: bool, work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work) if in_thread else work()


def _is_long(request: GenerateRequest) -> bool:
    if request.HasField("token_ids"):  # they would be packed to learn their size
        return len(request.token_ids.ids) > _MANY_IDS
    size_bytes: int = request.ByteSize()
    return size_bytes >= _LONG_REQUEST
