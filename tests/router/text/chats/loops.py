"""An agent in a tool loop sends the whole history back each time, in its own way."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from router.templates.agents import LOOK_UP, RESULT, Client
from router.templates.formats import Format, Said, own_id
from services.router.text.answer_message import AnswerCall, AnswerMessage
from services.router.text.chat_memory import AnswerMemory
from services.router.text.prompt import PastAnswers, PromptEncoder
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, ToolCall


@dataclass
class Loop:
    """This is an agent of one format. `held` are the ids of the last prompt and its answer."""

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

    def answer(self, prompt: Sequence[int], said: Said, written: str = "") -> None:
        """The model says it, in these words."""
        ids = self.tokenizer.encode(written or self.format_.written(said), special_tokens=False)
        number = len(self.messages)
        calls = [
            AnswerCall(
                own_id(call, index) if self.format_.own_ids else f"call_{number}_{index}",
                call.name,
                call.dumps(),
            )
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
                ChatMessage(role="tool", content=RESULT, tool_call_id=call.id, name=call.name)
            )

    def _past(self) -> tuple[PastAnswers, GenerateRequest]:
        chat = Chat(messages=self.messages, tools=[LOOK_UP], chat_template_kwargs=self.variables)
        return PastAnswers(self.memory, "t", "m", chat), GenerateRequest(chat=chat)


def with_content(said: Said) -> Said:
    return replace(said, content="Let me see.") if said.calls else said


def common(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length
