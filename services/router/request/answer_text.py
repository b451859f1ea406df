"""The text of an answer grows with its tokens; where it has a parser, the text is parsed.

    ids -> Detokenizer -------------------------> StopStrings -> text
    ids -> Detokenizer -> AnswerParser -> content -> StopStrings -> text
                                      \\-> reasoning, calls

A stop string is searched for only in the client's text, not in thinking or calls.
"""

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.router.parsing.parser_choice import AnswerParser
from services.router.parsing.piece import CallPiece, Piece
from services.router.text.answer_ends import StopStrings
from services.router.text.answer_message import AnswerCall, AnswerMessage
from services.router.text.detokenizer import TokenDecoder, detokenizer_of
from services.wire.isthmus.v1.generation_pb2 import ToolCallDelta

_CONTEXT = 12  # A decoder is in step after this many ids.
_ID_CHARS = 24
_OWN_ID = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ALPHABET = string.ascii_letters + string.digits
_TAIL = 16  # A text of this many characters is found again.


@dataclass(slots=True)
class Said:
    """This is the text of some more tokens; `num_tokens` of them belong to the answer. Where `ended`, the
    answer ends with them, whatever follows; `matched` is the stop string that ended it, or empty."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    num_tokens: int = 0
    ended: bool = False
    matched: str = ""


class AnswerText:
    """`decoder` shows the parser's markers. Without a parser all text is content. Without `parallel_calls`
    the answer ends with its first call. A stop string is content where the request `includes_stop`.
    `past_ids` are the ids of earlier calls, which a new call must not have."""

    def __init__(
        self,
        decoder: TokenDecoder,
        stop: tuple[str, ...],
        parser: AnswerParser | None = None,
        parallel_calls: bool = True,
        includes_stop: bool = False,
        past_ids: frozenset[str] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer_of(decoder)
        self._may_stop = bool(stop)
        self._stop = StopStrings(stop, includes_stop)
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._past_ids = past_ids
        self._contents: list[str] = []
        self._reasonings: list[str] = []
        self._calls: list[tuple[AnswerCall, list[str]]] = []  # Each call has the pieces of its arguments.
        self._resumption: Resumption | None = None
        self.num_called = 0  # These calls are complete.
        self.num_broken = 0  # These calls could not be read.
        self.reasoning_tokens = 0  # This includes the markers of thinking.

    def resume(self, prompt_ids: Sequence[int], said: str) -> None:
        """Continue the answer at the prompt's end, after the turn's text `said`. Call this first."""
        self._detokenizer.push(prompt_ids[-_CONTEXT:])
        if self._parser is not None:
            self._resumption = Resumption(self._parser, said)

    def push(self, token_ids: Sequence[int]) -> Said:
        """Add tokens. The text after the token that completes a stop string is dropped, so that the answer
        ends at the same token however its tokens arrive."""
        said = Said()
        if self._parser is None and not self._may_stop:
            said.content, said.num_tokens = self._detokenizer.push(token_ids), len(token_ids)
        else:
            self._push_each(said, token_ids)
        self._keep(said)
        return said

    def _push_each(self, said: Said, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            said.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self._parser is None:
                self._add_content(said, text)
            else:
                self._parse(said, text, self._parser)
            if said.ended:
                break

    def finish(self) -> Said:
        said, rest = Said(), self._detokenizer.finish()
        if self._parser is None:
            self._add_content(said, rest)
        else:
            self._add(said, self._parser.feed(rest))
            if not said.ended:
                self._add(said, self._parser.finish())
        if not said.ended:
            said.content += self._stop.finish()
        self._keep(said)
        return said

    def message(self) -> AnswerMessage:
        calls = tuple(replace(call, arguments="".join(texts)) for call, texts in self._calls)
        return AnswerMessage("".join(self._contents), "".join(self._reasonings), calls)

    def _parse(self, said: Said, text: str, parser: AnswerParser) -> None:
        thought = parser.thinks
        self._add(said, parser.feed(text))
        if thought or parser.thinks:
            self.reasoning_tokens += 1

    def _add(self, said: Said, piece: Piece) -> None:
        if self._resumption is not None:
            piece = self._resumption.rest_of(piece)
        said.reasoning += piece.reasoning
        self.num_broken += piece.broken
        for call in piece.calls:
            if not said.ended:
                self._add_call(said, call)
        self._add_content(said, piece.content)

    def _add_content(self, said: Said, text: str) -> None:
        released, matched = self._stop.push(text)
        said.content += released
        if matched is not None:
            said.ended, said.matched = True, matched

    def _add_call(self, said: Said, piece: CallPiece) -> None:
        if piece.name:
            self._calls.append((AnswerCall(self._id(piece.id), piece.name, ""), []))
        begun, arguments = self._calls[-1]
        arguments.append(piece.arguments)
        if piece.name or piece.arguments:
            id_, index = begun.id if piece.name else "", len(self._calls) - 1
            delta = ToolCallDelta(index=index, id=id_, name=piece.name, arguments=piece.arguments)
            said.calls.append(delta)
        if piece.ends:
            self.num_called += 1
            if not self._parallel_calls:
                said.content += self._stop.finish()
                said.ended = True

    def _id(self, own: str) -> str:
        """Keep the model's own id, which its template writes in the call and its result, if it is valid and
        new: clients identify calls by their ids, and a model may write one twice."""
        is_new = own not in self._past_ids and own not in (call.id for call, _ in self._calls)
        return own if _OWN_ID.fullmatch(own) and is_new else _new_id()

    def _keep(self, said: Said) -> None:
        self._contents.append(said.content)
        self._reasonings.append(said.reasoning)


def _new_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))


class Resumption:
    """This feeds `said` to `parser`. What the parser holds back of it, white space or half a marker, comes
    with the answer's next text, and is removed there."""

    def __init__(self, parser: AnswerParser, said: str) -> None:
        piece = parser.feed(said)
        tail = (piece.reasoning if parser.thinks else piece.content)[-_TAIL:]
        self._held = said[said.rfind(tail) + len(tail) :] if tail else said

    def rest_of(self, piece: Piece) -> Piece:
        return replace(piece, reasoning=self._rest(piece.reasoning), content=self._rest(piece.content))

    def _rest(self, text: str) -> str:
        if not text:
            return text
        held, self._held = self._held, self._held[len(text) :] if self._held.startswith(text) else ""
        return "" if held.startswith(text) else text.removeprefix(held)
