"""A tokenizer's response_template states the model's own format of answers; transformers' parser reads it."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.router.parsing.arguments import text_of
from services.router.parsing.calls import Schemas, call_of
from services.router.parsing.piece import CallPiece, ParsedCall, Piece, Sink, Trailed
from services.router.parsing.reader import Unreadable
from services.values.errors import ConfigError

_CALLS, _THINKING = "tool_calls", "thinking"
# Transformers' parser raises these for a region that does not match its field.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class ResponseTemplate:
    """The constructor raises ConfigError where transformers cannot read the template."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        # This import is not at the top: a router first makes sure that transformers loads without torch
        # (__main__).
        from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415
        from transformers.utils.chat_parsing.response_templates import load_response_template  # noqa: PLC0415

        try:
            fields = {name: {**field, "optional": True} for name, field in template["fields"].items()}
            self._template = load_response_template({**template, "fields": fields})
        except (*_UNREADABLE, re.error) as error:
            raise ConfigError(f"the tokenizer's response_template cannot be read: {error}") from error
        self._written = json.dumps(template, ensure_ascii=False)
        self._parser = _lenient(ResponseParser)

    def names(self, marker: str) -> bool:
        spellings = (json.dumps(spelled, ensure_ascii=False)[1:-1] for spelled in (marker, re.escape(marker)))
        return any(spelled in self._written for spelled in spellings)

    def parser(
        self, schemas: Schemas, prompt_end: str, has_calls: bool, has_thinking: bool
    ) -> "TemplateParser":
        """Return a parser. `prompt_end` must include the beginning of the answer's turn."""
        tools = [{"name": name, "parameters": schema} for name, schema in schemas.items()]
        prefix = prompt_end if self._template.start_anchor_re.search(prompt_end) else ""
        return TemplateParser(
            self._parser(self._template, prefix=prefix, tools=tools), has_calls, has_thinking
        )


class TemplateParser:
    """This is an AnswerParser. The template's fields `thinking` and `tool_calls` become these parts, and all
    others content."""

    def __init__(self, parser: Any, has_calls: bool, has_thinking: bool) -> None:
        self._parser = parser
        self._has_calls = has_calls
        self._sink = Sink()
        self._thinking = Trailed(self._sink.reasoning if has_thinking else self._sink.content)
        self._field, self._raw = "", ""
        self._is_first = True
        self._read(parser.initial_events)
        self._sink.take()  # These belong to the prompt.

    @property
    def thinks(self) -> bool:
        return self._field == _THINKING

    def feed(self, text: str) -> Piece:
        self._read(self._parser.feed(text))
        return self._sink.take()

    def finish(self) -> Piece:
        _, events = self._parser.finalize()
        self._read(events)
        return self._sink.take()

    def _read(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "region_open":
                    self._open(event["field"], event.get("opening", ""))
                case "region_chunk":
                    self._chunk(event["text"])
                case "region_close":
                    self._close(event.get("value"))

    def _open(self, field: str, opening: str) -> None:
        self._field, self._raw = field, opening
        self._begins = True
        if field == _CALLS and not self._has_calls:
            self._sink.content(opening)

    def _chunk(self, text: str) -> None:
        if self._begins and (self._field == _THINKING or not self._is_first):
            text = text.lstrip()
        self._begins = self._begins and not text
        if self._field == _CALLS and self._has_calls:
            self._raw += text
        elif self._field == _THINKING:
            self._thinking(text)
        else:
            self._sink.content(text)

    def _close(self, value: Any) -> None:
        if self._field == _CALLS and self._has_calls:
            try:
                for call in _calls_of(value):
                    self._sink.call(CallPiece(call.name, call.arguments, ends=True, id=call.id))
            except Unreadable:
                self._sink.broken(self._raw)
        self._field, self._is_first = "", False


def _calls_of(value: Any) -> list[ParsedCall]:
    return [_call_of(each) for each in (value if isinstance(value, list) else [value])]


def _call_of(value: Any) -> ParsedCall:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable
    arguments, id_ = function.get("arguments", {}), value.get("id")
    call = call_of(function["name"], arguments if isinstance(arguments, str) else text_of(arguments))
    return replace(call, id=id_) if isinstance(id_, str) else call


def _lenient(parser: Any) -> Any:
    """Return transformers' parser with two changes: an unreadable region closes without a value instead of
    raising, and the event that opens a region has the opening text."""

    class Lenient(parser):
        def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
            super()._open_explicit(events, field, match)
            events[-1]["opening"] = match.group()

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            field = self._current
            try:
                super()._close_current(events)
            except _UNREADABLE:
                events.append({"type": "region_close", "field": field, "value": None})
                self._reset_to_implicit()

    return Lenient
