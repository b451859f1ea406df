"""Parts of an answer, told apart."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's. `arguments`: a JSON object, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain with one more text. `broken`: calls that could not be read, and are content."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    broken: int = 0


class Sink:
    """Collects what is read until it is taken. `thinks`: what is read now is thinking."""

    def __init__(self) -> None:
        self.thinks = False
        self._clear()

    def _clear(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._broken = 0

    def content(self, text: str) -> None:
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def call(self, call: Call) -> None:
        self._calls.append(call)

    def broken(self, text: str) -> None:
        self._content.append(text)
        self._broken += 1

    def take(self) -> Piece:
        piece = Piece("".join(self._content), "".join(self._reasoning), tuple(self._calls), self._broken)
        self._clear()
        return piece
