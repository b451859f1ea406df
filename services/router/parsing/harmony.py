"""gpt-oss answers in harmony: messages, each with a header that states its kind. The module is pure.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with <|start|>assistant, so the first message may begin with the rest of its header: gpt-oss's
own chat template writes the recipient before the channel. Other text outside of messages is content.

     to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from services.router.parsing.calls import Calls, call_of, json_arguments
from services.router.parsing.reader import Reading, Unreadable

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, *ENDS, "<|constrain|>")
_OPENS = (START, CHANNEL)
_BOUNDS = (*_OPENS, *ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyAnswer:
    """Calls are content without `has_calls`, and thinking is without `has_thinking`."""

    calls: Calls
    has_calls: bool
    has_thinking: bool

    def read(self) -> Reading[None]:
        reader, sink = self.calls.reader, self.calls.sink
        blank = yield from reader.blank()
        recipients = (f"to={name}" for name in ("functions.", *self.calls.schemas))
        begun = yield from reader.either(*recipients, MESSAGE)
        if begun:
            reader.put_back(begun)
            yield from self.calls.attempt(self._message(""), blank)
        else:
            sink.content(blank)
        marker = yield from reader.upto(_BOUNDS, sink.content)
        while marker is not None:
            if marker in _OPENS:
                yield from self.calls.attempt(self._message(marker), marker)
            marker = yield from reader.upto(_BOUNDS, sink.content)

    def _message(self, opening: str) -> Reading[None]:
        reader = self.calls.reader
        header, marker = yield from reader.until(MESSAGE, START, *ENDS)
        if marker != MESSAGE:
            reader.put_back(marker)
            raise Unreadable
        function, channel = self._function(header), _CHANNEL.search(opening + header)
        if function and self.has_calls:
            yield from self._call(function)
            return
        if function:
            self.calls.sink.content(reader.taken)
        reader.forget()
        if channel and channel[1] == "analysis" and self.has_thinking:
            yield from self._think()
        else:
            yield from self._text(self.calls.sink.content)

    def _function(self, header: str) -> str:
        """Return the tool that a message is for, or "" for none. A declared tool may lack its namespace."""
        to = _RECIPIENT.search(header)
        return to[2] if to and (to[1] or to[2] in self.calls.schemas) else ""

    def _think(self) -> Reading[None]:
        self.calls.sink.thinks = True
        yield from self._text(self.calls.sink.reasoning)
        self.calls.sink.thinks = False

    def _text(self, sink: Callable[[str], None]) -> Reading[None]:
        marker = yield from self.calls.reader.upto(_BOUNDS, sink)
        self.calls.reader.put_back(marker or "")

    def _call(self, name: str) -> Reading[None]:
        reader = self.calls.reader
        if (yield from reader.next_is("{")):
            yield from json_arguments(self.calls, name)
            return
        texts: list[str] = []
        yield from self._text(texts.append)
        self.calls.add(call_of(name, "".join(texts)))
