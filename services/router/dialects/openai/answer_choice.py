"""An entry of `choices` is what the two shapes of OpenAI's answers share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.dialects.dialect_answer import Json
from services.values.errors import Aborted
from services.wire.isthmus.v1 import common_pb2, generation_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import ToolCallDelta

TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes | None]

# Clients that know an enumeration fail at any other word. `isthmus.finish_reason` tells the last two apart.
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CAPACITY: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """A part of the answer, or all of it, becomes a choice. `logprobs` is None where none were requested."""

    text: str
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    calls: Sequence[ToolCallDelta] = ()
    index: int = 0
    first_id: int | None = None  # It is an echoed prompt's, and nothing reports it.
    prompt_logprobs: Sequence[Json | None] | None = None  # This is vLLM's.

    @property
    def is_empty(self) -> bool:
        parts = (self.text, self.reasoning, self.calls, self.logprobs, self.token_ids, self.finish_reason)
        return not any(parts) and self.first_id is None

    def choice(self, content: Json, logprobs: Json | None) -> Json:
        choice = {"index": self.index, **content, "logprobs": logprobs, "finish_reason": self.finish_reason}
        if self.token_ids is not None:
            choice["token_ids"] = list(self.token_ids)
        return choice


class AnswerFormat(Protocol):
    """One of the two shapes is made for one answer: offsets into its text are counted."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    has_prompts: bool  # A choice has the ids of its prompt, as vLLM reports them; else the answer has them.

    def whole(self, piece: ChoicePiece) -> Json: ...

    def delta(self, piece: ChoicePiece) -> Json: ...

    def beside(self, piece: ChoicePiece) -> Json:
        """Return what the whole answer reports beside its choices."""

    def opening(self, index: int) -> Json | None:
        """Return the choice of a chunk that comes before all text, or None where the shape has none."""


def finish_reason(finish: generation_pb2.Finish) -> str:
    """Return OpenAI's word for the reason. Raises Aborted where somebody stopped the answer: OpenAI has no
    word for that."""
    if finish.reason not in _FINISH_REASONS:
        raise Aborted("the request was aborted before its answer was complete")
    return _FINISH_REASONS[finish.reason]


def finite(logprob: float) -> float:
    # JSON has neither infinity nor NaN; -9999.0 is OpenAI's word for what is impossible.
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0
