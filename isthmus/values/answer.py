"""An answer comes in pieces, and is complete at its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.errors import IncompleteAnswer
from isthmus.values.message import Message, ToolCall
from isthmus.values.reading import enum_names, read
from isthmus.values.usage import Placement, Stages, TokenLogprobs, Totals, Usage
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_REASONS = enum_names(common_pb2.FinishReason.DESCRIPTOR)
Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A piece of tool call number `index`; the call's first piece has its id and name."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer; `index` is the answer's number if there are several."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer.

    `finish_reason` is stop, length, tool_calls, capacity (no rank's pool has room for more) or aborted.
    `usage` is that of `placement`, where the answer began; `placements` are all that generated, `totals`
    their sums. `answer_id` refers to the answer in a later chat. Only the first answer has `prompt_token_ids`
    and `prompt_logprobs`. `left_out`, with best_of, has the costs of the answers that are not returned.
    """

    request_id: str
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    matched_stop: str
    usage: Usage
    stages: Stages
    placement: Placement | None
    placements: tuple[Placement, ...]
    totals: Totals
    answer_id: str = ""
    index: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    left_out: Totals | None = None
    _parse: Parse | None = field(default=None, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """Return the text as JSON, or as an instance of the requested class; None if no JSON was requested.

        Raises IncompleteAnswer if the text is cut off, or if the answer calls tools instead.
        """
        if self._parse is None:
            return None
        if self.finish_reason != "stop":
            raise IncompleteAnswer(f"the answer ended by {self.finish_reason}: {self.text[:200]!r}")
        return self._parse(self.text)

    def message(self, exact: bool = True) -> Message:
        """Return the answer as a past turn of a chat.

        With `exact` an answer without thinking and calls contains its ids, which any router accepts.
        Otherwise it has `answer_id`, by which the router that generated it finds the ids.
        """
        plain = exact and not (self.reasoning or self.tool_calls)
        return Message(
            "assistant",
            self.text,
            token_ids=self.token_ids if plain else (),
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            answer_id=self.answer_id,
        )


class Growing:
    """This collects one answer from its responses."""

    def __init__(self, parse: Parse | None = None) -> None:
        self._parse = parse
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._calls: dict[int, ToolCall] = {}
        self._first = generation_pb2.GenerateResponse()
        self._last: generation_pb2.GenerateResponse | None = None

    def add(self, response: generation_pb2.GenerateResponse) -> Piece:
        if not self._first.request_id:
            self._first = response
        if response.HasField("finish"):
            self._last = response
        piece = _piece_of(response)
        self._texts.append(piece.text)
        self._reasoning.append(piece.reasoning)
        self._ids += piece.token_ids
        self._logprobs += piece.logprobs
        self._prompt_logprobs += _logprobs_of(response.prompt_logprobs)
        for call in piece.tool_calls:
            self._add_call(call)
        return piece

    def _add_call(self, piece: ToolCallPiece) -> None:
        before = self._calls.get(piece.index, ToolCall("", "", ""))
        self._calls[piece.index] = ToolCall(
            before.id + piece.id, before.name + piece.name, before.arguments_json + piece.arguments_json
        )

    def answer(self) -> Answer:
        """Return the answer. Raises IncompleteAnswer before its end."""
        if self._last is None:
            raise IncompleteAnswer("the answer has not ended: read its stream to the end")
        finish = self._last.finish
        return Answer(
            request_id=self._last.request_id,
            text="".join(self._texts),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls[index] for index in sorted(self._calls)),
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            finish_reason=_REASONS[finish.reason],
            matched_stop=finish.matched_stop,
            usage=read(Usage, finish.usage),
            stages=read(Stages, finish.stages),
            placement=read(Placement, finish.placement) if finish.HasField("placement") else None,
            placements=tuple(read(Placement, each) for each in finish.placements),
            totals=read(Totals, finish.totals),
            answer_id=finish.answer_id,
            index=self._last.index,
            prompt_token_ids=tuple(self._first.prompt_token_ids),
            prompt_logprobs=tuple(self._prompt_logprobs),
            left_out=read(Totals, finish.left_out) if finish.HasField("left_out") else None,
            _parse=self._parse,
        )


def _piece_of(response: generation_pb2.GenerateResponse) -> Piece:
    calls = (ToolCallPiece(c.index, c.id, c.name, c.arguments) for c in response.tool_calls)
    return Piece(
        response.text,
        response.reasoning,
        tuple(calls),
        tuple(response.token_ids),
        _logprobs_of(response.logprobs),
        response.index,
    )


def _logprobs_of(given: Sequence[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(read(TokenLogprobs, each) for each in given)


class GrowingAnswers:
    """This collects all answers of one request, by their index."""

    def __init__(self, parse: Parse | None = None) -> None:
        self._parse = parse
        self._growing: dict[int, Growing] = {}

    def add(self, response: generation_pb2.GenerateResponse) -> Piece:
        return self._growing.setdefault(response.index, Growing(self._parse)).add(response)

    def answers(self) -> list[Answer]:
        """Return the answers. Raises IncompleteAnswer before all have ended."""
        if not self._growing:
            raise IncompleteAnswer("the answer has not begun: read its stream")
        return [self._growing[index].answer() for index in sorted(self._growing)]
