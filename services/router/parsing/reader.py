"""A text that arrives in pieces is read as if it were complete. The module is pure.

A reading is a generator: it yields where it needs more text, and returns what it has read. So the code of a
format follows its text, and the result does not depend on how the text is cut:

    def hermes(reader):                                  # <tool_call>{"name": ...}</tool_call>
        source = yield from reader.json()                # yields until the object is complete
        yield from reader.optional("</tool_call>")
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]

_BLANKS = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[^\s{\[<]*")
_LITERAL = re.compile(r"[^\s,:\]}]*")
# The read part of a text is dropped when it is longer than this and more than half of the text.
_READ_CHARS = 4096


def _nowhere(text: str) -> None: ...


class Unreadable(Exception):
    """The text since the mark does not follow the format."""


class Reader:
    """`put` adds text while readings need more; after `end` they get no more."""

    def __init__(self) -> None:
        self._text, self._at = "", 0  # The text before this position has been read.
        self._ended = False
        self._taken: list[str] = []

    def put(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        self._ended = True

    def mark(self, opening: str = "") -> None:
        self._taken = [opening]

    @property
    def taken(self) -> str:
        return "".join(self._taken)

    @property
    def has_more(self) -> bool:
        return self._at < len(self._text)

    def upto(self, markers: tuple[str, ...], sink: Callable[[str], object]) -> Reading[str | None]:
        """Take and return the first of the markers, or None at the end. The text before it goes to `sink` as
        soon as it cannot be part of a marker. No marker may be a part of another one."""
        search = _search_of(markers)
        while True:
            if found := search.pattern.search(self._text, self._at):
                sink(self._take(found.start() - self._at))
                return self._take(len(found.group()))
            left = len(self._text) - self._at
            held = 0 if self._ended else search.held(self._text, left)
            sink(self._take(left - held))
            if self._ended:
                return None
            yield

    def until(self, *markers: str) -> Reading[tuple[str, str]]:
        """Return the text before the first of the markers, and the marker, or raise Unreadable."""
        texts: list[str] = []
        marker = yield from self.upto(markers, texts.append)
        if marker is None:
            raise Unreadable
        return "".join(texts), marker

    def line(self, end: str) -> Reading[str]:
        """Return the text up to `end`, which must be on this line, so that a text that only looks like a call
        soon becomes content again. Raises Unreadable where the line ends first."""
        text, marker = yield from self.until(end, "\n")
        if marker != end:
            raise Unreadable
        return text

    def blank(self) -> Reading[str]:
        return (yield from self.word(_BLANKS))

    def at_end(self) -> Reading[bool]:
        while not self.has_more and not self._ended:
            yield
        return not self.has_more

    def word(self, pattern: re.Pattern[str] = _WORD) -> Reading[str]:
        """Return the text as long as it matches, by default up to white space or a bracket."""
        word = ""
        while True:
            end = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]  # It matches "".
            word += self._take(end - self._at)
            if self.has_more or self._ended:
                return word
            yield

    def either(self, *literals: str) -> Reading[str]:
        """Take and return the literal that comes next, the first of several, or "" for none."""
        while True:
            for literal in literals:
                here = self._text[self._at : self._at + len(literal)]
                if here == literal:
                    return self._take(len(literal))
                if literal.startswith(here) and not self._ended:
                    break  # More text may make it this one.
            else:
                return ""
            yield

    def expect(self, *literals: str) -> Reading[str]:
        """Take white space and one of the literals. Raises Unreadable where there is none."""
        yield from self.blank()
        literal = yield from self.either(*literals)
        if not literal:
            raise Unreadable
        return literal

    def next_is(self, literal: str) -> Reading[bool]:
        """Return whether the literal comes next. White space before it is taken, and the literal is not."""
        yield from self.blank()
        found = yield from self.either(literal)
        self.put_back(found)
        return bool(found)

    def optional(self, *literals: str) -> Reading[None]:
        """Take those of the literals that come next, in this order, with white space before each."""
        for literal in literals:
            yield from self.blank()
            yield from self.either(literal)

    def json(self, sink: Callable[[str], object] = _nowhere) -> Reading[str]:
        """Return the text of an object or a list, after white space; `sink` receives it as it arrives.
        Brackets within strings do not count. Raises Unreadable where there is none, or it does not end."""
        yield from self.blank()
        return (yield from self._scanned(("{", "["), sink))

    def json_value(self) -> Reading[str]:
        """Return the text of any value. A number or a word is not checked."""
        yield from self.blank()
        if self._text.startswith(("{", "[", '"'), self._at):
            return (yield from self._scanned(("{", "[", '"'), _nowhere))
        return (yield from self.word(_LITERAL))

    def _scanned(self, opens: tuple[str, ...], sink: Callable[[str], object]) -> Reading[str]:
        if not self._text.startswith(opens, self._at):
            raise Unreadable
        texts, scan = [], _JsonScan()
        while True:
            end = scan.end_in(self._text, self._at)
            texts.append(self._take((len(self._text) if end is None else end) - self._at))
            sink(texts[-1])
            if end is not None:
                return "".join(texts)
            if self._ended:
                raise Unreadable
            yield

    def one(self) -> Reading[str]:
        while not self.has_more:
            if self._ended:
                raise Unreadable
            yield
        return self._take(1)

    def put_back(self, text: str) -> None:
        if self._at >= len(text) and self._text.startswith(text, self._at - len(text)):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0
        num_chars = len(text)
        while self._taken and num_chars:  # Much may have been taken since the mark.
            last = self._taken.pop()
            kept = last[: max(0, len(last) - num_chars)]
            num_chars -= len(last) - len(kept)
            if kept or not self._taken:
                self._taken.append(kept)
                break

    def _take(self, num_chars: int) -> str:
        if not num_chars:
            return ""
        text = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._at > _READ_CHARS and 2 * self._at > len(self._text):
            self._text, self._at = self._text[self._at :], 0
        if self._taken:
            self._taken.append(text)
        return text

    def forget(self) -> None:
        self._taken = []


class _Search:
    def __init__(self, markers: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def held(self, text: str, left: int) -> int:
        for length in range(min(left, self._longest), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


_search_of = lru_cache(maxsize=256)(_Search)  # There are few, and all are in the formats' code.


class _JsonScan:
    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end_in(self, text: str, at: int) -> int | None:
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (self._INSIDE if self._in_string else self._OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            if self._step(found.group()):
                return at
        return None

    def _step(self, character: str) -> bool:
        match character:
            case '"':
                self._in_string = not self._in_string
            case "\\":
                self._escaped = True
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
        return self._depth == 0 and not self._in_string
