"""A request's prompt becomes ids, in whichever form the client sent it.

Past answers of a chat that are remembered are found by any of three names, and used if the message is the
same.

    tool call id    This is our own random id.
    answer id       This is Finish.answer_id, which is random.
    fingerprint     This covers role, content and calls of the answer and all turns before it.

Each name includes the tenant and the model. The client's message is compared with the answer's before the ids
are used, so that they can never change what a prompt says.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np

from services.router.text.answer_message import AnswerCall, AnswerMessage, CallText, digest, message_digest
from services.router.text.chat_memory import AnswerMemory, RememberedAnswer
from services.router.text.chat_turns import content_of
from services.router.text.rendered_chat import NO_ANSWERS, PastAnswer, render_chat
from services.router.text.tokenizer import Tokenizer
from services.values.errors import ContextExceeded, InvalidRequest
from services.wire.generation_messages import PackedIds
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest

# A past answer in a chat is one of these: the client sent its ids; we inserted its ids; we remembered it, but
# the template shows it differently; we did not remember it.
GIVEN, FOUND, CHANGED, UNKNOWN = OUTCOMES = ("given", "found", "changed", "unknown")
_PROMPT_END = 64  # No generation prompt has so many ids, even with an id per byte.


class PastAnswers:
    """These are the past answers of one request. `digest` takes time and may run in a thread; all other
    methods run on the loop."""

    def __init__(self, memory: AnswerMemory, tenant: str, model: str, chat: Chat) -> None:
        self._memory = memory
        self._tenant = tenant
        self._names = (tenant, model)
        self._chat = chat
        self._chain: list[bytes] = []  # Each digest covers a message and all before it.
        self.known: dict[int, PastAnswer] = {}
        self.outcomes: Counter[str] = Counter()

    def digest(self) -> None:
        chain = self._key("chat")
        for message in self._chat.messages:
            chain = digest(chain, message.role, _digest_of(message))
            self._chain.append(chain)

    def recall(self) -> None:
        """Fill `known`, by the message's index; `digest` must have run."""
        for index, message in enumerate(self._chat.messages):
            if message.role == "assistant" and not message.token_ids:
                answer = self._find(index, message)
                if answer is not None:
                    self.known[index] = PastAnswer(answer.ids, bool(answer.reasoning), answer.prompt_end)

    def rendered(self, spliced: frozenset[int]) -> None:
        for index, message in enumerate(self._chat.messages):
            if message.role == "assistant":
                known = FOUND if index in spliced else CHANGED if index in self.known else UNKNOWN
                self.outcomes[GIVEN if message.token_ids else known] += 1

    def remember(
        self, prompt_ids: "array[int]", ids: "array[int]", message: AnswerMessage, answer_id: str
    ) -> bool:
        what = message_digest(message.content, message.calls)
        reasoning = message.reasoning.strip()
        keys = [digest(self._chain[-1], "assistant", what), self._key("answer", answer_id)]
        keys += [self._key("call", call.id) for call in message.calls if call.id]
        thought = digest(reasoning) if reasoning else b""
        return self._memory.remember(
            self._tenant, keys, RememberedAnswer(ids, prompt_ids[-_PROMPT_END:], what, thought)
        )

    def _find(self, index: int, message: ChatMessage) -> RememberedAnswer | None:
        what = _digest_of(message)
        for key in self._keys(index, message):
            answer = self._memory.recall(self._tenant, key)
            if answer is not None and answer.message_digest == what and _has_same_reasoning(answer, message):
                return answer
        return None

    def _keys(self, index: int, message: ChatMessage) -> Iterator[bytes]:
        if message.answer_id:
            yield self._key("answer", message.answer_id)
        for call in message.tool_calls:
            if call.id:
                yield self._key("call", call.id)
        yield self._chain[index]

    def _key(self, kind: str, name: str = "") -> bytes:
        return digest(*self._names, kind, name)


def _digest_of(message: ChatMessage) -> bytes:
    calls: Sequence[AnswerCall] = [
        AnswerCall(call.id, call.name, call.arguments) for call in message.tool_calls
    ]
    return message_digest(content_of(message), calls)


def _has_same_reasoning(answer: RememberedAnswer, message: ChatMessage) -> bool:
    reasoning = message.reasoning.strip()
    return not reasoning or digest(reasoning) == answer.reasoning


_Result = TypeVar("_Result")

# This is the size of a serialized request in bytes; encoding a larger one would delay all streams of the
# loop.
_LONG_REQUEST = 4096
# Fewer ids take less than the 5 ms for which a thread would stop the loop, too.
_MANY_IDS = 1 << 16

_IDS_NAME = "token_ids.ids"


_TOKEN_BYTES = 16  # The average token of any language is less than half as long.
_LEAST_TEXT_BYTES = 1 << 20
_BESIDE_PROMPT_BYTES = 1 << 20  # Schemas, variables, biases and names need no more.
_MOST_MESSAGE_BYTES = 64 << 20  # The ranks' own messages have the same limit.
_UNKNOWN_CONTEXT_MESSAGE_BYTES = 8 << 20


def most_text_bytes(context_tokens: int) -> int:
    """Return how many bytes of UTF-8 may be tokenized for one context, far above what it holds."""
    return max(_LEAST_TEXT_BYTES, _TOKEN_BYTES * context_tokens)


def most_message_bytes(context_tokens: int | None, vocab_size: int) -> int:
    """Return the limit on the bytes of a client's message, in protobuf or JSON, which the model's context
    determines.

    A prompt is text, of which JSON may escape every second byte, or ids in decimal with a comma and a space
    each. A mebibyte is for all else. This gives 3 MiB for 4,096 tokens, 5 MiB for 131,072 and 33 MiB for
    1,048,576; it is 8 MiB where config.json states no context (None).
    """
    if context_tokens is None:
        return _UNKNOWN_CONTEXT_MESSAGE_BYTES
    ids_bytes = (len(str(vocab_size)) + 2) * context_tokens
    prompt_bytes = max(2 * most_text_bytes(context_tokens), ids_bytes)
    return min(prompt_bytes + _BESIDE_PROMPT_BYTES, _MOST_MESSAGE_BYTES)


class PromptEncoder:
    """This makes ids of text, chats or ids.

    `max_context_tokens` limits prompt and output together. `max_text_bytes` (UTF-8) limits a text before it
    is tokenized; its default is far above any context. `call_text` writes past calls as the model does, for
    chat templates that cannot show them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
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
        """Encode as `encode_now` does, in a thread where the request is long. A chat's past answers are
        looked up in `past`."""
        is_long = _is_long(request)
        if past is not None:
            await _do(is_long, partial(self._digest, request.chat, past))
            past.recall()
        return await _do(is_long, partial(self.encode_now, request, past))

    def _digest(self, chat: Chat, past: PastAnswers) -> None:
        self._check_chat(chat)  # A chat that is refused for its length needs no digests.
        past.digest()

    def check(self, given: PackedIds) -> PackedIds:
        self._check_prompt(given, _IDS_NAME)
        return given

    def encode_now(self, request: GenerateRequest, past: PastAnswers | None = None) -> PackedIds:
        """Return at least one id, all in the vocabulary, with room for one more token in the context.

        Raises:
            ContextExceeded: The context cannot hold the prompt.
            InvalidRequest: There is no prompt, or an empty one, or an id outside of the vocabulary, or the
                template refuses the chat; the message begins with the field.
        """
        name = _IDS_NAME if request.HasField("token_ids") else "prompt"
        match request.WhichOneof("prompt"):
            case "text":
                special = request.add_special_tokens or not request.HasField("add_special_tokens")
                prompt = PackedIds.of(self._encode_text(request.text, special))
            case "chat":
                prompt = PackedIds.of(self._encode_chat(request.chat, past))
            case "token_ids":
                # Unpacked ids would take many times their bytes.
                self._check_len(len(request.token_ids.ids), name)
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
        # A message is at least one token; very many empty ones would keep the template busy.
        num_parts = len(chat.messages) + len(chat.tools) + sum(len(each.tool_calls) for each in chat.messages)
        if num_parts > self._max_context_tokens:
            self._refuse_len(f"{num_parts} messages, tools and calls")
        self._check_bytes(_texts_of_messages(chat), "chat.messages")
        self._check_bytes(_texts_of_tools(chat), "chat.tools")

    def _encode_chat(self, chat: Chat, past: PastAnswers | None) -> list[int]:
        if past is None:  # With past answers it was checked before.
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
        # Many clients that know no code recognize a full context by OpenAI's wording.
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
    if request.HasField("token_ids"):  # Their ids would be packed to learn their size.
        return len(request.token_ids.ids) > _MANY_IDS
    size_bytes: int = request.ByteSize()
    return size_bytes >= _LONG_REQUEST
