"""This holds what an answer says, and finds when two of them say the same. Pure.

A parser of answers makes an AnswerMessage at an answer's end. The router remembers its ids, and finds them
again when a client sends the answer back in a later chat, in whatever form its JSON has come to have.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """A model calls a tool. `arguments` are JSON as it wrote them, or what it wrote instead."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """A client gets this answer, all deltas put together.

    `calls` are those that the client sees: what could not be parsed is in `content`.
    """

    content: str
    reasoning: str = ""
    calls: tuple[AnswerCall, ...] = ()


def said(content: str, calls: Sequence[AnswerCall]) -> bytes:
    """Return a digest of what was said: equal for messages that differ by ids of calls, blanks and order of
    keys in their arguments, by how those are escaped, or by white space around the content."""
    names = [[call.name, canonical_json(call.arguments)] for call in calls]
    return digest(json.dumps([content.strip(), names]))


def canonical_json(text: str) -> str:
    """Return the same for texts that are the same to a reader of JSON. A text that is no JSON stays, an empty
    one is {}."""
    try:
        return json.dumps(json.loads(text.strip() or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float:
    """1.0 is 1 to clients that know one kind of number."""
    number = float(text)
    return int(number) if number.is_integer() else number


def with_whole_characters(source: str) -> str:
    """Return the JSON with U+FFFD where it escapes half of a surrogate pair: models write that, and nobody
    can pass it on. JSON without any stays as it is.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    if "\\u" not in source:
        return source
    text = json.dumps(json.loads(source), ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return source if whole == text else whole


def digest(*parts: str | bytes) -> bytes:
    """Return a digest of the parts in their order, each apart from the next."""
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()
