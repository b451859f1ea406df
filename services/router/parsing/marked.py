"""An answer may be plain text with markers around thinking and around calls. The module is pure.

    <think> thinking </think> content <tool_call> call </tool_call> <tool_call> call </tool_call>

Thinking may begin an answer, or follow calls; a marker in the middle of content is content. White space
between these parts belongs to none of them. Some models call without closing their thinking:

    <think> thinking <tool_call> call </tool_call>

Complete calls at the end of an answer are calls there, too. Where other text or a closing marker follows,
they are only thinking.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from services.router.parsing.calls import Calls, ReadCalls
from services.router.parsing.piece import CallPiece, Led, Sink, Trailed
from services.router.parsing.reader import Reader, Reading, Unreadable

# After this much text in thinking that was tried as calls, and was not, no more is tried.
_MAX_TRIED_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class Thinking:
    opens: str
    closes: str


@dataclass(frozen=True, slots=True)
class Wrapping:
    """These are around content and not part of it: one of `opens` before it, one of `closes` after it. Either
    may be missing."""

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(before + each for each in self.closes for before in ("\n", ""))


NO_WRAPPING = Wrapping()


@dataclass(frozen=True, slots=True)
class CallMarkers:
    opens: tuple[str, ...]
    read: ReadCalls
    begins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    thinking: Thinking | None
    call_markers: CallMarkers | None
    calls: Calls
    thinks: bool = False
    wrapping: Wrapping = NO_WRAPPING

    def read(self) -> Reading[None]:
        place = _Place.BEGINNING
        if self.thinks:
            place = yield from self._think()
        while place is not _Place.END:
            place = yield from self._read_from(place)

    def _read_from(self, place: "_Place") -> Reading["_Place"]:
        reader = self.calls.reader
        blank = "" if place is _Place.CONTENT else (yield from reader.blank())
        if place is not _Place.CONTENT and self.thinking and (yield from reader.either(self.thinking.opens)):
            return (yield from self._think())
        if place is not _Place.CONTENT and (yield from reader.either(*self.wrapping.opens)):
            return _Place.BEHIND
        begins = self.call_markers.begins if self.call_markers and place is not _Place.CONTENT else ()
        if begun := (yield from reader.either(*begins)):
            reader.put_back(begun)
            return (yield from self._call("", blank))
        content = Led(blank if place is _Place.BEGINNING else "", self.calls.sink.content)
        marker = yield from reader.upto((*self._opens, *self.wrapping.ends), content)
        if marker in self.wrapping.ends:
            return (yield from self._unwrap(marker, content))
        if marker is not None:
            return (yield from self._call(marker, content.lead))
        content.finish()
        return _Place.END

    @property
    def _opens(self) -> tuple[str, ...]:
        return self.call_markers.opens if self.call_markers else ()

    def _unwrap(self, marker: str, content: Led) -> Reading["_Place"]:
        """Take a closing marker out of the content where nothing or a marker follows; else it is content."""
        reader = self.calls.reader
        blank = yield from reader.blank()
        follows = yield from reader.either(*self._opens, *self.wrapping.opens, *self.wrapping.closes)
        reader.put_back(follows)
        if follows or (yield from reader.at_end()):
            return _Place.BEHIND
        content(marker + blank)
        return _Place.CONTENT

    def _think(self) -> Reading["_Place"]:
        assert self.thinking is not None
        reader, sink = self.calls.reader, self.calls.sink
        sink.thinks = True
        yield from reader.blank()
        while (yield from reader.either(self.thinking.opens)):  # Some models repeat the prompt's marker.
            yield from reader.blank()
        thought = Trailed(sink.reasoning)
        watched = _Watched(thought, self.call_markers, self.calls)
        closes = yield from reader.upto((self.thinking.closes,), watched.add)
        called = watched.finish()
        if closes is None:
            reader.put_back(called)
        else:
            thought(called)
        sink.thinks = False
        return _Place.BEHIND

    def _call(self, opening: str, blank: str) -> Reading["_Place"]:
        """Read calls. `blank` is the text before the marker, and content if there is no call."""
        assert self.call_markers is not None
        is_whole = yield from self.calls.attempt(self.call_markers.read(self.calls, opening), blank + opening)
        return _Place.BEHIND if is_whole else _Place.CONTENT


class _Watched:
    """Thinking goes through this to `sink`. Possible calls at the end of the answer are held back until other
    text follows."""

    def __init__(self, sink: Callable[[str], None], markers: CallMarkers | None, calls: Calls) -> None:
        self._sink, self._markers = sink, markers
        self._reader = Reader()
        self._trial = _Trial(self._reader, Sink(), calls.schemas)
        self._left = _MAX_TRIED_CHARS
        self._called = ""
        self._steps = self._read()
        next(self._steps)

    def add(self, text: str) -> None:
        self._reader.put(text)
        next(self._steps)

    def finish(self) -> str:
        self._reader.end()
        next(self._steps, None)
        return self._called

    def _read(self) -> Reading[None]:
        reader = self._reader
        while (marker := (yield from reader.upto(self._opens, self._sink))) is not None:
            reader.mark(marker)
            is_rest = yield from self._is_rest(marker)
            taken = reader.taken
            reader.forget()
            if is_rest:
                self._called = taken
                return
            self._left -= len(taken)
            self._sink(marker)
            reader.put_back(taken[len(marker) :])

    @property
    def _opens(self) -> tuple[str, ...]:
        return self._markers.opens if self._markers and self._left > 0 else ()

    def _is_rest(self, marker: str) -> Reading[bool]:
        assert self._markers is not None
        try:
            while marker:
                yield from self._markers.read(self._trial, marker)
                yield from self._reader.blank()
                marker = yield from self._reader.either(*self._opens)
        except Unreadable:
            return False
        return not self._reader.has_more


class _Trial(Calls):
    def report(self, piece: CallPiece) -> None:
        pass


class _Place(Enum):
    BEGINNING = "of the answer: its white space is content, if content follows"
    BEHIND = "thinking or calls: white space is nobody's"
    CONTENT = "which goes on"
    END = "of the answer"
