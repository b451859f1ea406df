"""Answers are split into their parts while they come. Pure."""

from collections.abc import Callable
from typing import Protocol

from services.router.parsing.calls import Calls, Schemas
from services.router.parsing.piece import Piece, Sink
from services.router.parsing.reader import Reader, Reading


class AnswerParser(Protocol):
    """It reads one answer, whose pieces together do not depend on where its text is cut. Nothing is lost:
    what cannot be read is content."""

    @property
    def thinks(self) -> bool:
        """It is true while what has been fed ends within thinking."""

    def feed(self, text: str) -> Piece: ...

    def finish(self) -> Piece:
        """Return the rest. Nothing can be fed after."""


class ReadingParser:
    """`answer` is a reading of one of our formats, given where it puts what it reads."""

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
        next(self._steps, None)  # it goes as far as the text does
