"""A conversation knows what has been said, and makes the request for the next turn."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.cli.chat.streamed_answer import StreamedAnswer
from services.wire.isthmus.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class ChatTurn:
    question: str
    answer: StreamedAnswer


@dataclass(slots=True)
class Conversation:
    """`new_id` draws the conversation's id, anew when it begins again."""

    new_id: Callable[[], str]
    system: str = ""
    model: str = ""
    sampling: common_pb2.SamplingParams = field(default_factory=common_pb2.SamplingParams)
    tenant: str = ""
    turns: list[ChatTurn] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but not the system's message."""
        self.id = self.new_id()
        self.turns.clear()

    def messages(self) -> list[generation_pb2.ChatMessage]:
        """Return the messages; an answer that says nothing takes its question with it."""
        said = [generation_pb2.ChatMessage(role="system", content=self.system)] if self.system else []
        for turn in self.turns:
            if (message := turn.answer.message()) is not None:
                said += [generation_pb2.ChatMessage(role="user", content=turn.question), message]
        return said

    def request(self, question: str, request_id: str = "") -> generation_pb2.GenerateRequest:
        asked = generation_pb2.ChatMessage(role="user", content=question)
        return generation_pb2.GenerateRequest(
            request_id=request_id,
            model=self.model,
            chat=generation_pb2.Chat(messages=[*self.messages(), asked]),
            sampling=self.sampling,
            conversation_id=self.id,
            tenant=self.tenant,
        )
