"""Answers that think, speak and call, for a backend to play."""

from collections.abc import Sequence

from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateResponse, ToolCallDelta, Usage

USAGE = Usage(prompt_tokens=10, completion_tokens=7, reused_tokens=4, computed_tokens=6, reasoning_tokens=2)
TOOL_CALLS = common_pb2.FINISH_REASON_TOOL_CALLS
LENGTH = common_pb2.FINISH_REASON_LENGTH


def said(text: str = "", reasoning: str = "", answer_id: str = "") -> GenerateResponse:
    return GenerateResponse(request_id="r1", text=text, reasoning=reasoning, answer_id=answer_id)


def called(index: int, arguments: str = "", call_id: str = "", name: str = "") -> GenerateResponse:
    delta = ToolCallDelta(index=index, id=call_id, name=name, arguments=arguments)
    return GenerateResponse(request_id="r1", tool_calls=[delta])


def ended(
    reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_STOP, matched_stop: str = ""
) -> GenerateResponse:
    finish = Finish(reason=reason, usage=USAGE, answer_id="h1", matched_stop=matched_stop)
    return GenerateResponse(request_id="r1", finish=finish)


def agents_answer() -> Sequence[GenerateResponse]:
    """It thinks, says something, and calls two tools."""
    return (
        said(reasoning="Hm", answer_id="h1"),
        said(reasoning="m."),
        said("Let me "),
        said("look."),
        called(0, '{"city":', "call_a", "weather"),
        called(0, ' "Bern"}'),
        called(1, "{}", "call_b", "time"),
        ended(TOOL_CALLS),
    )
