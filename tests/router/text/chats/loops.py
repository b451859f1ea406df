"""Tool loops as clients play them: an agent that sends the whole history back each time, in its own way."""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from router.templates.formats import Call, Format, Said
from services.router.text.chats.answer_memory import AnswerMemory
from services.router.text.chats.answers import AnswerCall, AnswerMessage
from services.router.text.chats.past_answers import PastAnswers
from services.router.text.prompt import PromptEncoder
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, Tool, ToolCall

LOOK_UP = Tool(name="look_up", description="Looks up", parameters='{"type": "object", "properties": {}}')
ARGUMENTS = {"what": "the café's ß", "limit": 3, "where": {"b": [1, 2], "a": None}}


def reordered(arguments: str) -> str:
    return json.dumps(dict(reversed(json.loads(arguments).items())), ensure_ascii=False)


def compact(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"))


@dataclass(frozen=True)
class Client:
    """What it does to an answer before it sends it back."""

    gives_reasoning: bool = False
    arguments: Callable[[str], str] = str
    keeps_ids: bool = True

    def sends(self, message: ChatMessage) -> ChatMessage:
        sent = ChatMessage()
        sent.CopyFrom(message)
        if not self.gives_reasoning:
            sent.reasoning = ""
        for number, call in enumerate(sent.tool_calls):
            call.arguments = self.arguments(call.arguments)
            call.id = call.id if self.keeps_ids else f"own_{number}"
        return sent


CLIENTS = {
    "gives reasoning back": Client(gives_reasoning=True),
    "does not": Client(),
    "reorders keys": Client(arguments=reordered),
    "sends arguments compact": Client(arguments=compact),
    "has ids of its own": Client(keeps_ids=False),
}


@dataclass
class Loop:
    """An agent of one format. `held` are the ids of the last prompt and its answer."""

    format_: Format
    tokenizer: Tokenizer
    client: Client
    memory: AnswerMemory = field(default_factory=lambda: AnswerMemory(1 << 20))
    keep_thinking: bool = False
    variables: str = ""
    messages: list[ChatMessage] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def prompt(self) -> list[int]:
        past, request = self._past()
        encoder = PromptEncoder(self.tokenizer, 100_000, 512, keep_thinking=self.keep_thinking)
        past.digest()
        past.recall()
        prompt = list(encoder.encode_now(request, past).ids)
        self.outcomes = dict(past.outcomes)
        self._asked = past
        return prompt

    def ask(self, text: str) -> None:
        self.messages.append(ChatMessage(role="user", content=text))

    def answer(self, prompt: Sequence[int], said: Said) -> None:
        """The model says it."""
        ids = self.tokenizer.encode(self.format_.written(said), special_tokens=False)
        number = len(self.messages)
        calls = [
            AnswerCall(f"call_{number}_{index}", call.name, call.dumps())
            for index, call in enumerate(said.calls)
        ]
        message = AnswerMessage(said.content, said.reasoning, tuple(calls))
        assert self._asked.remember(array("I", prompt), array("I", ids), message, f"answer_{number}")
        self.held = [*prompt, *ids[:-1]]
        self._take(message)

    def _take(self, message: AnswerMessage) -> None:
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.calls]
        answered = ChatMessage(
            role="assistant", content=message.content, reasoning=message.reasoning, tool_calls=calls
        )
        sent = self.client.sends(answered)
        self.messages.append(sent)
        for call in sent.tool_calls:
            self.messages.append(
                ChatMessage(role="tool", content="It's 3 < 4 & ä", tool_call_id=call.id, name=call.name)
            )

    def _past(self) -> tuple[PastAnswers, GenerateRequest]:
        chat = Chat(messages=self.messages, tools=[LOOK_UP], chat_template_kwargs=self.variables)
        return PastAnswers(self.memory, "t", "m", chat), GenerateRequest(chat=chat)


def answers(format_: Format, number: int) -> Iterator[Said]:
    """What a model says in a loop of so many calls; the last is the answer to all."""
    for index in range(number):
        arguments = ARGUMENTS | {"turn": index}
        calls = [Call("look_up", arguments)] * (2 if format_.parallel and index % 3 == 2 else 1)
        yield Said("", f"First the {index}th café.\nThen more." * format_.thinks, calls)
    yield Said("It is\n42, ä!", "Done." * format_.thinks)


def with_content(said: Said) -> Said:
    return replace(said, content="Let me see.") if said.calls else said


def common(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
