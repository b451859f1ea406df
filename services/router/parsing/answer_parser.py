"""What a model wrote, told apart while it comes. Pure."""

from collections.abc import Callable
from typing import Protocol

from services.router.parsing.calls import Calls, Schemas
from services.router.parsing.piece import Piece, Sink
from services.router.parsing.reader import Reader, Reading


class AnswerParser(Protocol):
    """Of one answer, whose pieces together do not depend on where its text is cut. Nothing is lost: what
    cannot be read is content."""

    @property
    def thinks(self) -> bool:
        """Whether what has been fed ends within thinking."""

    def feed(self, text: str) -> Piece: ...

    def finish(self) -> Piece:
        """The rest. Nothing can be fed after."""


class ReadingParser:
    """`answer`: a reading of one of our formats, of what it puts where."""

    def __init__(self, schemas: Schemas, answer: Callable[[Calls], Reading[None]]) -> None:
        self._reader, self._sink = Reader(), Sink()
        self._steps = answer(Calls(self._reader, self._sink, schemas))
        self._go_on()

    @property
    def thinks(self) -> bool:
        return self._sink.thinks

    def feed(self, text: str) -> Piece:
        self._reader.put(text)
        self._go_on()
        return self._sink.take()

    def finish(self) -> Piece:
        self._reader.end()
        self._go_on()
        return self._sink.take()

    def _go_on(self) -> None:
        next(self._steps, None)  # as far as the text goes
