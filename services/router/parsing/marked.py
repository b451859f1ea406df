"""An answer as plain text with markers around what is thought and around calls. Pure.

    <think> thinking </think> content <tool_call> call </tool_call> <tool_call> call </tool_call>

Thinking may begin an answer, or follow calls; a marker in the middle of content is content. White space
between these parts is none of theirs.
"""

from dataclasses import dataclass
from enum import Enum

from services.router.parsing.blanks import Led, Trailed
from services.router.parsing.calls import Calls, ReadCalls
from services.router.parsing.reader import Reading


@dataclass(frozen=True, slots=True)
class Thinking:
    opens: str
    closes: str


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """`opens` may stand anywhere in content. `begins`: what calls begin with where an answer does."""

    opens: tuple[str, ...]
    read: ReadCalls
    begins: str = ""


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """`thinks`: the prompt ended within thinking."""

    thinking: Thinking | None
    call_markers: CallMarkers | None
    calls: Calls
    thinks: bool = False

    def read(self) -> Reading[None]:
        place = _Place.BEGINNING
        if self.thinks:
            place = yield from self._think()
        while place is not _Place.END:
            place = yield from self._read_from(place)

    def _read_from(self, place: "_Place") -> Reading["_Place"]:
        """Content, up to what comes behind it, and that."""
        reader = self.calls.reader
        blank = "" if place is _Place.CONTENT else (yield from reader.blank())
        if place is not _Place.CONTENT and self.thinking and (yield from reader.either(self.thinking.opens)):
            return (yield from self._think())
        begins = self.call_markers.begins if self.call_markers and place is _Place.BEGINNING else ""
        if begins and (yield from reader.either(begins)):
            reader.put_back(begins)
            return (yield from self._call("", blank))
        content = Led(blank if place is _Place.BEGINNING else "", self.calls.sink.content)
        marker = yield from reader.upto(self.call_markers.opens if self.call_markers else (), content)
        if marker is not None:
            return (yield from self._call(marker, content.lead))
        content.finish()
        return _Place.END

    def _think(self) -> Reading["_Place"]:
        assert self.thinking is not None
        reader, sink = self.calls.reader, self.calls.sink
        sink.thinks = True
        yield from reader.blank()
        yield from reader.upto((self.thinking.closes,), Trailed(sink.reasoning))
        sink.thinks = False
        return _Place.BEHIND

    def _call(self, opening: str, blank: str) -> Reading["_Place"]:
        """`blank` stands before the marker, and is content if that opens none."""
        assert self.call_markers is not None
        is_whole = yield from self.calls.attempt(self.call_markers.read(self.calls, opening), blank + opening)
        return _Place.BEHIND if is_whole else _Place.CONTENT


class _Place(Enum):
    BEGINNING = "of the answer: its white space is content, if content follows"
    BEHIND = "thinking or calls: white space is nobody's"
    CONTENT = "which goes on"
    END = "of the answer"
