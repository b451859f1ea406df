"""This module holds the message of an answer, and finds out when two messages are the same. It is pure.

A parser makes an AnswerMessage at an answer's end. The router remembers the answer's ids, and finds them
again when a client sends the answer back in a later chat, however its JSON has changed.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """This is a tool call. `arguments` are the JSON, or the invalid text, that the model wrote."""

    id: str
    name: str
    arguments: str


CallText = Callable[[Sequence[AnswerCall]], str]  # It writes calls as a model does.


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """This is the whole answer that a client gets. `calls` are those that the client sees; calls that could
    not be parsed are in `content`."""

    content: str
    reasoning: str = ""
    calls: tuple[AnswerCall, ...] = ()


def message_digest(content: str, calls: Sequence[AnswerCall]) -> bytes:
    """Return a digest that is equal for messages that differ only in the ids of calls, in blanks, key order
    and escapes in arguments, and in white space around the content."""
    names = [[call.name, canonical_json(call.arguments)] for call in calls]
    return digest(json.dumps([content.strip(), names]))


def canonical_json(text: str) -> str:
    """Return one text for equal JSON values. A text that is not JSON stays, and an empty one is {}."""
    try:
        return json.dumps(json.loads(text.strip() or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text


# Anthropic advises to send arguments that cannot be read under this key.
_INVALID = "INVALID_JSON"


def as_object(text: str) -> str:
    """Return the arguments of a call as a JSON object, whatever the model wrote. An object stays as it is.

    {"a": "x          an answer ended there        {"a": "x"}
    "{\\"a\\": 1}"      a client wrote JSON as JSON  {"a": 1}
    a = 1             nothing else reads it        {"INVALID_JSON": "a = 1"}
    """
    for source in (text.strip() or "{}", _closed(text)):
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return source
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return as_object(value)
    return json.dumps({_INVALID: text}, ensure_ascii=False)


_IN_JSON = re.compile(r'"(?:[^"\\]|\\.)*("?)|[{}\[\],]', re.DOTALL)
_HALF_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)\Z")
_HALF_MEMBER = re.compile(r'\s*(?:,\s*)?(?:"(?:[^"\\]|\\.)*"\s*(?::\s*)?)?[-+.\w]*', re.DOTALL)


def _closed(text: str) -> str:
    """Return JSON that broke off with its strings, lists and objects closed, and without a member that has no
    value yet. It may still be no JSON."""
    open_, end, is_text = list[str](), 0, False
    for found in _IN_JSON.finditer(text):
        token = found[0]
        is_text = token[0] == '"' and not found[1]
        if token in ("{", "["):
            open_.append("}" if token == "{" else "]")
        elif token in ("}", "]") and open_:
            open_.pop()
        if token in ("{", "[", "}", "]", ","):
            end = found.start() if token == "," else found.end()
    if is_text:
        text = text[: -len(half[1])] if (half := _HALF_ESCAPE.search(text)) else text
        text += '"'
    closing = "".join(reversed(open_))
    try:
        json.loads(text + closing)
    except (ValueError, RecursionError):
        text = text[:end] if _HALF_MEMBER.fullmatch(text, end) else text
    return text + closing


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def with_whole_characters(source: str) -> str:
    """Return the JSON with U+FFFD in place of each escaped half of a surrogate pair: models write these, and
    no text can hold them. JSON without any stays as it is.

    Raises ValueError where it is not JSON, and RecursionError where it is nested too deeply.
    """
    if "\\u" not in source:
        return source
    text = json.dumps(json.loads(source), ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return source if whole == text else whole


def digest(*parts: str | bytes) -> bytes:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()
