"""Flags, the tokenizer or the chat template choose the parsers of a model's answers.

The parsers split an answer into parts as it arrives.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.parsing import harmony
from services.router.parsing.answer_formats import (
    AUTO,
    CALL_FORMATS,
    HARMONY,
    NONE,
    TEMPLATE,
    THINKING_FORMATS,
    likely_calls,
    likely_thinking,
)
from services.router.parsing.answer_grammars import AnswerWriting, HarmonyWriting, MarkedWriting
from services.router.parsing.call_grammars import WRITINGS
from services.router.parsing.calls import Calls, Schemas
from services.router.parsing.harmony import HarmonyAnswer
from services.router.parsing.marked import NO_WRAPPING, MarkedAnswer, Thinking, Wrapping
from services.router.parsing.piece import CallPiece, ParsedCall, Piece, Sink
from services.router.parsing.reader import Reader, Reading
from services.router.parsing.response_template import ResponseTemplate
from services.values.errors import ConfigError


class AnswerParser(Protocol):
    """This reads one answer. Its pieces together do not depend on how the text is cut, and no text is lost:
    unreadable text is content."""

    @property
    def thinks(self) -> bool: ...

    def feed(self, text: str) -> Piece: ...

    def finish(self) -> Piece: ...


class ReadingParser:
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
        next(self._steps, None)  # It goes as far as the text does.


# A chat template is tried with this call and the tool's schema.
PROBE = ParsedCall("look_up", '{"count": 7}')
PROBE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"count": {"type": "integer", "description": "How many."}},
}


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """`tools` and `reasoning` name formats or nothing. `template` is set where one is "template"."""

    tools: str = NONE
    reasoning: str = NONE
    template: ResponseTemplate | None = None

    def shows(self, special_token: str) -> bool:
        if self.template is not None:
            return self.template.names(special_token)
        markers: tuple[str, ...] = harmony.MARKERS if HARMONY in (self.tools, self.reasoning) else ()
        if self.tools in CALL_FORMATS:
            markers += CALL_FORMATS[self.tools].markers
        if self.reasoning in THINKING_FORMATS:
            markers += THINKING_FORMATS[self.reasoning].markers
        return any(special_token in marker for marker in markers)  # Some markers consist of several.

    @property
    def stop_token(self) -> str | None:
        """Return the special token that ends an answer with calls, whatever the model's settings say."""
        return "<|call|>" if self.tools == HARMONY else None

    def parser(self, schemas: Schemas | None, prompt_end: str) -> AnswerParser | None:
        """Return a parser of an answer that may call these tools; with None its calls are content.
        `prompt_end` is some hundred characters. Return None where there is only content."""
        has_calls = schemas is not None and self.tools != NONE
        has_thinking = self.reasoning != NONE
        if not has_calls and not has_thinking:
            return None
        schemas = schemas or {}
        if self.template is not None:
            return self.template.parser(schemas, prompt_end, has_calls, has_thinking)
        if HARMONY in (self.tools, self.reasoning):
            return ReadingParser(schemas, lambda calls: HarmonyAnswer(calls, has_calls, has_thinking).read())
        return ReadingParser(schemas, lambda calls: self._marked(calls, has_calls, prompt_end).read())

    @property
    def writing(self) -> AnswerWriting | None:
        if self.template is not None:
            return None
        if HARMONY in (self.tools, self.reasoning):
            return HarmonyWriting()
        return MarkedWriting(self._thinking, WRITINGS.get(self.tools), self._wrapping)

    @property
    def _thinking(self) -> Thinking | None:
        return THINKING_FORMATS[self.reasoning].thinking if self.reasoning in THINKING_FORMATS else None

    @property
    def _wrapping(self) -> Wrapping:
        return THINKING_FORMATS[self.reasoning].wrapping if self._thinking else NO_WRAPPING

    def begins_thinking(self, prompt_end: str) -> bool:
        return self._thinking is not None and prompt_end.rstrip().endswith(self._thinking.opens)

    def thinks_behind(self, prompt_end: str, turn_text: str) -> bool:
        """Return whether an answer that continues the turn's text `turn_text` begins within thinking."""
        if self._thinking is None:
            return False
        opened, closed = turn_text.rfind(self._thinking.opens), turn_text.rfind(self._thinking.closes)
        return opened > closed or (opened == closed and self.begins_thinking(prompt_end))

    def _marked(self, calls: Calls, has_calls: bool, prompt_end: str) -> MarkedAnswer:
        return MarkedAnswer(
            self._thinking,
            CALL_FORMATS[self.tools].call_markers if has_calls else None,
            calls,
            thinks=self.begins_thinking(prompt_end),
            wrapping=self._wrapping,
        )


def choose(
    tools: str,
    reasoning: str,
    chat_template: str,
    response_template: Mapping[str, Any] | None,
    shown: Sequence[str] = (),
) -> ParserChoice:
    """Choose by the flags `tools` and `reasoning` and by the model's `chat_template`, which is "" for none.
    `shown` is what that template writes of an answer that calls PROBE, with some text before; it is empty
    where the template shows no calls.

    Raises ConfigError where two parsers exclude each other, or a response_template is missing or wrong.
    """
    has_own = response_template is not None
    written = "\n".join([chat_template, *shown])
    if tools == AUTO:
        takes_own = has_own and reasoning in (AUTO, TEMPLATE, NONE)
        tools = TEMPLATE if takes_own else _written_calls(written, shown)
    if reasoning == AUTO:
        takes_own = has_own and tools in (TEMPLATE, NONE)
        reasoning = TEMPLATE if takes_own else likely_thinking(written)
    for whole in (HARMONY, TEMPLATE):  # One parser reads all of the answer.
        if whole in (tools, reasoning) and not {tools, reasoning} <= {whole, NONE}:
            raise ConfigError(f"--tool-parser={tools} and --reasoning-parser={reasoning} do not go together")
    if TEMPLATE not in (tools, reasoning):
        return ParserChoice(tools, reasoning)
    if response_template is None:
        raise ConfigError("--tool-parser=template: the model's tokenizer has no response_template")
    return ParserChoice(tools, reasoning, ResponseTemplate(response_template))


def _written_calls(written: str, shown: Sequence[str]) -> str:
    """Return the format in which a template writes calls: a likely one that reads the call it shows; else any
    that does, those without a marker first. A template's text may mention a marker that its models do not
    write, or write as a part of another one. NONE means that the format is not known."""
    likely = [*likely_calls(written)]
    if not shown:
        return next(iter(likely), NONE)
    others = sorted(CALL_FORMATS, key=lambda name: len(CALL_FORMATS[name].call_markers.opens))
    return next((name for name in [*likely, *others] if _reads(name, shown)), NONE)


def _reads(name: str, shown: Sequence[str]) -> bool:
    return any(_is_probe(piece) for text in shown for piece in _calls_in(name, text))


def _calls_in(name: str, text: str) -> Sequence[CallPiece]:
    parser = ParserChoice(name).parser({PROBE.name: PROBE_SCHEMA}, "")
    assert parser is not None
    return [*parser.feed(text).calls, *parser.finish().calls]


def _is_probe(piece: CallPiece) -> bool:
    is_named = piece.ends and piece.name == PROBE.name
    return is_named and bool(json.loads(piece.arguments) == json.loads(PROBE.arguments))
