"""Models write values in other ways than JSON; they are read as they come. Pure.

Python    "a", 'it\\'s', 1, True, None, [1, 2], {"a": 1}
Gemma     <|"|>a<|"|>, 1, true, [1, 2], {a: 1}
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from services.router.parsing.json_text import is_text, value_of
from services.router.parsing.reader import Reader, Reading, Unreadable

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {c: c for c in "\\'\"/"}
_FLOAT = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d{1,2})?")  # JSON would write it otherwise
_KEY = re.compile(r"[^\s=:,(){}\[\]]*")
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Literals:
    """Strings stand between `quotes`; where it `escapes`, a backslash within them does. A number, a constant
    or, where `takes_bare`, a string without quotes is made of `word`."""

    quotes: tuple[str, ...]
    escapes: bool
    word: re.Pattern[str]
    takes_bare: bool = False

    def members(self, reader: Reader, sign: str, end: str, depth: int = 0) -> Reading[dict[str, Any]]:
        """Read keys and values with `sign` between them, up to `end`. Raise Unreadable for all else."""
        found: dict[str, Any] = {}
        while not (yield from self._ends(reader, end, bool(found))):
            yield from reader.blank()
            key = yield from self._key(reader)
            yield from reader.expect(sign)
            found[key] = yield from self.value(reader, depth + 1)
        return found

    def value(self, reader: Reader, depth: int = 0) -> Reading[Any]:
        """Raise Unreadable for what is none."""
        if depth > _MAX_DEPTH:
            raise Unreadable
        yield from reader.blank()
        opening = yield from reader.either("[", "{", "(", *self.quotes)
        match opening:
            case "[":
                return (yield from self._items(reader, "]", depth))
            case "(":
                return (yield from self._items(reader, ")", depth))
            case "{":
                return (yield from self.members(reader, ":", "}", depth))
            case "":
                return self._word_value((yield from reader.word(self.word)).strip())
        return (yield from self._string(reader, opening))

    def _items(self, reader: Reader, end: str, depth: int) -> Reading[list[Any]]:
        found: list[Any] = []
        while not (yield from self._ends(reader, end, bool(found))):
            found.append((yield from self.value(reader, depth + 1)))
        return found

    @staticmethod
    def _ends(reader: Reader, end: str, follows: bool) -> Reading[bool]:
        """Return whether a list ends; a comma is taken, which may stand before its end, too."""
        yield from reader.blank()
        if follows and not (yield from reader.either(",")):
            yield from reader.expect(end)
            return True
        yield from reader.blank()
        return bool((yield from reader.either(end)))

    def _key(self, reader: Reader) -> Reading[str]:
        quote = yield from reader.either(*self.quotes)
        if quote:
            return (yield from self._string(reader, quote))
        key = yield from reader.word(_KEY)
        if not key:
            raise Unreadable
        return key

    def _word_value(self, word: str) -> Any:
        if word in _WORDS:
            return _WORDS[word]
        try:
            return float(word) if _FLOAT.fullmatch(word) else value_of(word)
        except Unreadable:
            if not (self.takes_bare and word):
                raise
            return word

    def _string(self, reader: Reader, quote: str) -> Reading[str]:
        texts: list[str] = []
        while True:
            text, marker = yield from reader.until(quote, *(("\\",) if self.escapes else ()))
            texts.append(text)
            if marker == quote:
                return _unescaped("".join(texts)) if self.escapes else "".join(texts)
            texts += [marker, (yield from reader.one())]


def _unescaped(text: str) -> str:
    """Escapes are read as Python does; one that is none stays. Two halves of a pair are one character."""
    text = _ESCAPE.sub(_character, text)
    return text if is_text(text) else str(json.loads(json.dumps(text)))


def _character(found: re.Match[str]) -> str:
    name = found[1]
    if len(name) > 1:
        code = int(name[1:], 16)
        return chr(code) if code < 0x110000 else found[0]
    return _ESCAPED.get(name, found[0])


# A word is a number or a constant, and only in Gemma's a string, too.
PYTHON = Literals(("'", '"'), escapes=True, word=re.compile(r"[\w.+\-]*"))
GEMMA = Literals(('<|"|>',), escapes=False, word=re.compile(r"[^,\[\]{}<]*"), takes_bare=True)
FUNCTION_GEMMA = Literals(("<escape>",), escapes=False, word=GEMMA.word, takes_bare=True)
