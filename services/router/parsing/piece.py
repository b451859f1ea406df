"""These are the parts that an answer is split into. White space around them is dropped or kept as it arrives.
The module is pure."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """This is a tool call. `arguments` are a JSON object, as the model wrote it where it wrote JSON. `id` is
    the model's own id of the call, by which its template assigns results; most models have none."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """This is a part of a call. One with a name begins a call; one with `ends` completes it. A call without
    the latter broke off, and so did its arguments."""

    name: str = ""
    arguments: str = ""
    ends: bool = False
    id: str = ""  # This comes with a name, and is the model's own.


@dataclass(frozen=True, slots=True)
class Piece:
    """These parts became certain with the last text. `broken` counts calls that have no valid end."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    broken: int = 0


class Sink:
    """This collects the parts until they are taken. `thinks` says that the current text is thinking,
    `has_open_call` that a call has begun and is not complete."""

    def __init__(self) -> None:
        self.thinks = False
        self.has_open_call = False
        self._clear()

    def _clear(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPiece] = []
        self._broken = 0

    def content(self, text: str) -> None:
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def call(self, piece: CallPiece) -> None:
        if self._calls and not piece.name:  # This continues the same call.
            begun = self._calls.pop()
            piece = CallPiece(begun.name, begun.arguments + piece.arguments, piece.ends, begun.id)
        self._calls.append(piece)
        self.has_open_call = not piece.ends

    def broken(self, text: str) -> None:
        self._content.append(text)
        self._broken += 1
        self.has_open_call = False

    def take(self) -> Piece:
        piece = Piece("".join(self._content), "".join(self._reasoning), tuple(self._calls), self._broken)
        self._clear()
        return piece


class Led:
    def __init__(self, lead: str, sink: Callable[[str], None]) -> None:
        self.lead, self._sink = lead, sink

    def __call__(self, text: str) -> None:
        if text:
            self._sink(self.lead + text)
            self.lead = ""

    def finish(self) -> None:
        self._sink(self.lead)


class Trailed:
    """White space is passed on with the text after it, and dropped at the end."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._held, self._sink = "", sink

    def __call__(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._sink(kept)


class Unlined:
    """A line end at the beginning is dropped where the text is `led` by one, and one at the end is `held`
    back. `begins_line` says that the last character was a line end."""

    def __init__(self, sink: Callable[[str], object], led: bool = True) -> None:
        self.held = ""
        self.begins_line = False
        self._begins, self._sink = led, sink

    def __call__(self, text: str) -> None:
        if text:
            self.begins_line = text.endswith("\n")
        if self._begins and text:
            text, self._begins = text.removeprefix("\n"), False
        text = self.held + text
        kept = text.removesuffix("\n")
        self.held = text[len(kept) :]
        self._sink(kept)
