"""A person sees an answer as it comes, and a program reads something else of it."""

import sys
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console

from services.cli import screen
from services.cli.chat.streamed_answer import StreamedAnswer
from services.cli.chat.turn_figures import summary
from services.wire.isthmus.v1 import generation_pb2

_THINKING, _CALL, _ASIDE, _ERROR = "dim italic", "cyan", "dim", "red"


class Display(Protocol):
    @property
    def width(self) -> int | None:
        pass

    def piece(self, response: generation_pb2.GenerateResponse) -> None:
        pass

    def end(self, answer: StreamedAnswer) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def aside(self, text: str) -> None:
        """Show what is said of the chat, not in it."""

    def error(self, text: str) -> None:
        pass


@dataclass(slots=True)
class Plain:
    """It writes the answers alone, one after the other; thinking is left out."""

    width: int | None = None

    def piece(self, response: generation_pb2.GenerateResponse) -> None:
        print(response.text, end="", flush=True)

    def end(self, answer: StreamedAnswer) -> None:
        print("\n".join(["", *(shown_call(call) for _, call in sorted(answer.calls.items()))]), flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def aside(self, text: str) -> None:
        pass

    def error(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Terminal:
    """It writes thinking dim before the answer, calls in a line each, and a line of figures behind it."""

    stream: TextIO
    color: screen.Color
    _console: Console = field(init=False)
    _section: object = None  # The last piece belonged to it.

    def __post_init__(self) -> None:
        self._console = screen.console(self.stream, self.color)

    @property
    def width(self) -> int | None:
        return screen.width(self.stream)

    def piece(self, response: generation_pb2.GenerateResponse) -> None:
        if response.reasoning:
            self._write("thinking", response.reasoning, _THINKING)
        if response.text:
            self._write("text", response.text)
        for piece in response.tool_calls:
            head = f"calls {piece.name} " if piece.name else ""
            self._write(("call", piece.index), head + piece.arguments, _CALL)

    def end(self, answer: StreamedAnswer) -> None:
        if self._section is not None:
            self._out("\n")
        self._section = None
        self.aside(summary(answer))

    def say(self, text: str) -> None:
        self._out(f"{text}\n")

    def aside(self, text: str) -> None:
        if text:
            self._console.print(visible(text), style=_ASIDE, markup=False, highlight=False)

    def error(self, text: str) -> None:
        if self._section is not None:
            self._out("\n")
        self._section = None
        self._console.print(visible(text), style=_ERROR, markup=False, highlight=False)

    def _write(self, section: object, text: str, style: str | None = None) -> None:
        if self._section not in (None, section):
            self._out("\n\n" if "thinking" in (self._section, section) else "\n")
        self._section = section
        self._out(visible(text), style)

    def _out(self, text: str, style: str | None = None) -> None:
        self._console.out(text, end="", style=style, highlight=False)
        self.stream.flush()


def shown_call(call: generation_pb2.ToolCall) -> str:
    return f"calls {call.name} {call.arguments}"


def visible(text: str) -> str:
    """Leave out what would command the terminal: a model may write any character."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {code: "\N{REPLACEMENT CHARACTER}" for code in range(0x7F, 0xA0)}
