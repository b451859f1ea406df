"""What an answer that goes on with a past turn must not say again."""

from dataclasses import replace

from services.router.parsing.parser import AnswerParser
from services.router.parsing.piece import Piece

_TAIL = 16  # characters: enough to find again


class Resumption:
    """`parser` is brought to where `said` ends. What it holds back of that, white space or half a marker,
    comes with the next text of the answer, and is taken off there."""

    def __init__(self, parser: AnswerParser, said: str) -> None:
        piece = parser.feed(said)
        told = (piece.reasoning if parser.thinks else piece.content)[-_TAIL:]
        self._held = said[said.rfind(told) + len(told) :] if told else said

    def rest_of(self, piece: Piece) -> Piece:
        return replace(piece, reasoning=self._rest(piece.reasoning), content=self._rest(piece.content))

    def _rest(self, text: str) -> str:
        if not text:
            return text
        held, self._held = self._held, self._held[len(text) :] if self._held.startswith(text) else ""
        return "" if held.startswith(text) else text.removeprefix(held)
