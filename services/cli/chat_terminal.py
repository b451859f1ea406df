"""This module is both ends of a chat: a person at a terminal, or a pipe of lines that a program reads the
answers of.
"""

import atexit
import os
import readline
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console

from services.cli import screen
from services.cli.conversation import StreamedAnswer, summary
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1 import generation_pb2

_THINKING, _CALL, _ASIDE, _ERROR = "dim italic", "cyan", "dim", "red"


@dataclass(slots=True)
class Plain:
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
    """It shows thinking dimly before the answer, each tool call on its own line, and then the figures."""

    stream: TextIO
    color: screen.Color
    _console: Console = field(init=False)
    _section: object = None  # This names the section of the last piece that was written.

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
    """Replace control characters, which would command the terminal: a model may write any character."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {code: "\N{REPLACEMENT CHARACTER}" for code in range(0x7F, 0xA0)}


_PROMPT, _GOES_ON = "> ", ". "
_MOST_REMEMBERED = 1000


def piped() -> Iterator[str]:
    try:
        yield from (text for line in sys.stdin if (text := line.strip()))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8: {error}") from error


def typed(commands: Sequence[str], say_leaving: str, is_colored: bool) -> Iterator[str]:
    r"""Yield each text that is typed, until Ctrl-D or a second Ctrl-C. A `\` at its end continues a line."""
    _set_up(commands)
    warned = False
    while True:
        try:
            text = _whole(is_colored).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if warned:
                return
            print(say_leaving)
            warned = True
            continue
        warned = False
        if text:
            yield text


def _whole(is_colored: bool) -> str:
    text = input(_marked(_PROMPT) if is_colored else _PROMPT)
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{input(_GOES_ON)}"
    return text


def _marked(prompt: str) -> str:
    # Readline wants 1 and 2 around characters that take no column.
    return f"\001\x1b[1m\002{prompt}\001\x1b[0m\002"


def _set_up(commands: Sequence[str]) -> None:
    readline.set_completer_delims("")
    readline.set_completer(completer(commands))
    readline.parse_and_bind("tab: complete")
    file = history_file()
    with suppress(OSError):  # There is no history yet, or we may not read it.
        readline.read_history_file(file)
    readline.set_history_length(_MOST_REMEMBERED)
    atexit.register(_keep, file)


def completer(commands: Sequence[str]) -> Callable[[str, int], str | None]:
    names = [f"/{name}" for name in commands]

    def complete(text: str, state: int) -> str | None:
        found = [name for name in names if text and name.startswith(text)]
        return found[state] if state < len(found) else None

    return complete


def history_file() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "isthmus" / "chat_history"


def _keep(file: Path) -> None:
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.write_history_file(file)
