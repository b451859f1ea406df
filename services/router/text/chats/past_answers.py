"""A chat's past answers that are remembered are found by any of three names, and used if they say the same.

    tool call id    ours, random
    answer id       Finish.answer_id, random
    fingerprint     of the answer and all turns before it: role, content and calls, without thinking and ids

The tenant and the model are in every name. What a client sends back is compared with what the answer said
before its ids are used: they can never change what was said.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from services.router.text.chats.answer_memory import AnswerMemory, RememberedAnswer
from services.router.text.chats.answer_message import AnswerCall, AnswerMessage, digest, said
from services.router.text.chats.chat_turns import said_in
from services.router.text.chats.rendered_chat import PastAnswer
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage

# A past answer in a chat is one of these: the client sent its ids; we put its ids in; we knew it, but the
# template shows it otherwise; we did not know it.
GIVEN, FOUND, CHANGED, UNKNOWN = OUTCOMES = ("given", "found", "changed", "unknown")
_PROMPT_END = 64  # no generation prompt has so many ids, even of a byte each


class PastAnswers:
    """These belong to one request. `digest` is work, and may be done in a thread; everything else is done on
    the loop."""

    def __init__(self, memory: AnswerMemory, tenant: str, model: str, chat: Chat) -> None:
        self._memory = memory
        self._tenant = tenant
        self._names = (tenant, model)
        self._chat = chat
        self._chain: list[bytes] = []  # each is of a message with all before it
        self.known: dict[int, PastAnswer] = {}
        self.outcomes: Counter[str] = Counter()

    def digest(self) -> None:
        chain = self._key("chat")
        for message in self._chat.messages:
            chain = digest(chain, message.role, _said_by(message))
            self._chain.append(chain)

    def recall(self) -> None:
        """Fill `known`, by the message's index. `digest` comes before."""
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
        """Remember the answer to this chat, which has ended. Return whether there is memory for it."""
        what = said(message.content, message.calls)
        reasoning = message.reasoning.strip()
        keys = [digest(self._chain[-1], "assistant", what), self._key("answer", answer_id)]
        keys += [self._key("call", call.id) for call in message.calls if call.id]
        thought = digest(reasoning) if reasoning else b""
        return self._memory.remember(
            self._tenant, keys, RememberedAnswer(ids, prompt_ids[-_PROMPT_END:], what, thought)
        )

    def _find(self, index: int, message: ChatMessage) -> RememberedAnswer | None:
        what = _said_by(message)
        for key in self._keys(index, message):
            answer = self._memory.recall(self._tenant, key)
            if answer is not None and answer.said == what and _thought_so(answer, message):
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


def _said_by(message: ChatMessage) -> bytes:
    calls: Sequence[AnswerCall] = [
        AnswerCall(call.id, call.name, call.arguments) for call in message.tool_calls
    ]
    return said(said_in(message), calls)


def _thought_so(answer: RememberedAnswer, message: ChatMessage) -> bool:
    """A client that sends no thinking back has not changed it."""
    reasoning = message.reasoning.strip()
    return not reasoning or digest(reasoning) == answer.reasoning
