"""An answer is put together from its responses as they come."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.wire.isthmus.v1 import common_pb2, generation_pb2


@dataclass(slots=True)
class StreamedAnswer:
    """`clock` tells seconds; an answer begins to be asked for when it is made."""

    clock: Callable[[], float]
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, generation_pb2.ToolCall] = field(default_factory=dict)
    finish: generation_pb2.Finish | None = None
    _first_s: float | None = None
    _last_s: float = 0.0
    _after_first: int = 0  # These tokens came after those of the first response.

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        self.text += response.text
        self.reasoning += response.reasoning
        for piece in response.tool_calls:
            call = self.calls.setdefault(piece.index, generation_pb2.ToolCall(id=piece.id, name=piece.name))
            call.arguments += piece.arguments
        if response.HasField("finish"):
            self.finish = response.finish
        if response.token_ids:
            self._time(len(response.token_ids))
            self.token_ids.extend(response.token_ids)

    def _time(self, num_tokens: int) -> None:
        self._last_s = self.clock()
        if self._first_s is None:
            self._first_s = self._last_s
        else:
            self._after_first += num_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Return the pace after the first tokens; None where none came later."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return self._after_first / (self._last_s - self._first_s)

    @property
    def was_aborted(self) -> bool:
        return self.finish is not None and self.finish.reason == common_pb2.FINISH_REASON_ABORTED

    def message(self) -> generation_pb2.ChatMessage | None:
        """Return it as it goes back with the next turn; None where it says nothing.

        Its ids stand in the prompt as they are, at any router. One that thinks or calls tools goes by its
        name instead, for the template decides what of that is shown again; the router has the ids.
        """
        if not self.token_ids:
            return None
        message = generation_pb2.ChatMessage(role="assistant", content=self.text)
        if not self.reasoning and not self.calls:
            message.token_ids.extend(self.token_ids)
            return message
        message.reasoning = self.reasoning
        message.tool_calls.extend(call for _, call in sorted(self.calls.items()))
        message.answer_id = self.finish.answer_id if self.finish else ""
        return message
