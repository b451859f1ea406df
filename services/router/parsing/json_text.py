"""A model's JSON is checked, and kept as text. Pure."""

import json
from typing import Any, NoReturn

from services.router.parsing.reader import Unreadable


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_BLANKS = " \t\r\n"


def value_of(source: str) -> Any:
    """Raise Unreadable for what is not JSON."""
    try:
        return _DECODER.decode(source)
    except (ValueError, RecursionError) as error:
        raise Unreadable from error


def text_of(value: Any) -> str:
    """Write it readably where that can be: half of a surrogate pair is no text, and stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def members_of(source: str) -> dict[str, str]:
    """Return the text of each member of an object, by name. Raise Unreadable for all that is none."""
    if not isinstance(value_of(source), dict):
        raise Unreadable
    members, at = {}, _behind_blanks(source, source.index("{") + 1)
    while source[at] != "}":
        name, at = _DECODER.raw_decode(source, at)
        begin = _behind_blanks(source, _behind_blanks(source, at) + 1)  # the value begins behind the colon
        _, end = _DECODER.raw_decode(source, begin)
        members[name] = source[begin:end]
        at = _behind_blanks(source, end)
        at = _behind_blanks(source, at + 1) if source[at] == "," else at
    return members


def _behind_blanks(source: str, at: int) -> int:
    while source[at] in _BLANKS:
        at += 1
    return at


def arguments_of(source: str) -> str:
    """Return an object's text. Nothing and null are {}; a string that holds an object is what it holds, for
    some models write their arguments twice. Raise Unreadable for all else."""
    source = source.strip(_BLANKS)
    if source in ("", "null", '""'):
        return "{}"
    value = value_of(source)
    if isinstance(value, str):
        source, value = value, value_of(value)
    if not isinstance(value, dict) or not is_text(source):
        raise Unreadable
    return source
