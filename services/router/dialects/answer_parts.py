"""Some APIs report an answer as parts, which keep thinking, text and tool calls apart.

    responses    reasoning | reasoning text |  text  | call 0 | call 0 call 1 | end
    steps        O  G      |  G     C  O  G |   G    | C O  G |  G   C  O  G  |  C

Here O is Opened, G is Grown and C is Closed. One part is open at a time. A joined response gives its thinking
first, then its text, then its calls, whatever their order was.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from services.wire.isthmus.v1.generation_pb2 import GenerateResponse, ToolCallDelta


class Kind(Enum):
    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Part:
    index: int  # This is the part's place in the answer, from 0.
    kind: Kind
    call_id: str = ""
    name: str = ""  # This is the tool's name.
    text: str = ""  # A closed part has all of its text; a call's text is its arguments.


@dataclass(frozen=True, slots=True)
class Opened:
    part: Part


@dataclass(frozen=True, slots=True)
class Grown:
    part: Part
    delta: str


@dataclass(frozen=True, slots=True)
class Closed:
    part: Part


Step = Opened | Grown | Closed


class Parts:
    """This class makes parts of an answer's responses. It makes no thinking part where `shows_thinking` is
    false. An answer without any content has one part of empty text."""

    def __init__(self, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._open: Part | None = None
        self._texts: list[str] = []  # These are the texts of the open part.
        self._call_index = 0  # This is valid only while a call is open.
        self._num_opened = 0

    def take(self, response: GenerateResponse) -> Iterator[Step]:
        if response.reasoning and self._shows_thinking:
            yield from self._grow(Kind.THINKING, response.reasoning)
        if response.text:
            yield from self._grow(Kind.TEXT, response.text)
        for delta in response.tool_calls:
            yield from self._call(delta)
        if response.HasField("finish"):
            if self._num_opened == 0:
                yield from self._start(Kind.TEXT)
            yield from self._close()

    def _call(self, delta: ToolCallDelta) -> Iterator[Step]:
        is_open = self._open is not None and self._open.kind is Kind.CALL and self._call_index == delta.index
        if not is_open:
            self._call_index = delta.index
            yield from self._start(Kind.CALL, delta.id, delta.name)
        if delta.arguments:
            yield from self._grow(Kind.CALL, delta.arguments)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self._start(kind)
        assert self._open is not None, "it was started"
        self._texts.append(text)
        yield Grown(self._open, text)

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._close()
        self._open, self._texts = Part(self._num_opened, kind, call_id, name), []
        self._num_opened += 1
        yield Opened(self._open)

    def _close(self) -> Iterator[Step]:
        if self._open is not None:
            closed, self._open = replace(self._open, text="".join(self._texts)), None
            yield Closed(closed)


def parts_of(joined: GenerateResponse, shows_thinking: bool = True) -> list[Part]:
    return [step.part for step in Parts(shows_thinking).take(joined) if isinstance(step, Closed)]
