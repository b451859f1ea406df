"""These readers check the types of a JSON body's members, and report an error by the member's name in
the body."""

import json
import math
from array import array
from collections.abc import Mapping
from typing import Any

from services.values.errors import InvalidRequest

Refused = Mapping[str, tuple[object, ...]]

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
_MOST_OBJECTS = 1 << 16  # This limits a list's items: a body of `{}` could have millions.
# This limits the nesting of lists and objects that are written as JSON again, which recurses.
_MOST_NESTED = 200


class InvalidParameter(InvalidRequest):
    """The message begins with `param`, the parameter's name in the body. Half of a surrogate pair in a
    client's key is escaped, as an answer cannot hold it."""

    def __init__(self, param: str, problem: str) -> None:
        self.param = param.encode(errors="backslashreplace").decode()
        super().__init__(self.param, problem)


class Body:
    """A Body reads the members of a JSON object by their types. A null counts as absent, as with OpenAI."""

    def __init__(self, fields: Mapping[str, object], prefix: str = "") -> None:
        self._fields = fields
        self._prefix = prefix

    def refuse(self, names: Refused, instead: Mapping[str, str], prefix: str = "") -> None:
        """Raise InvalidParameter for a member of these names whose value is none of its harmless ones.
        `instead` gives advice by name."""
        for name, value in self._fields.items():
            if name not in names:
                continue
            harmless = (None, *names[name])
            # In Python 1 == True, but not in JSON.
            if not any(type(value) is type(ok) and value == ok for ok in harmless):
                advice = instead.get(name, "leave it out")
                raise InvalidParameter(
                    self._prefix + prefix + name, f"is not supported by this server; {advice}"
                )

    @property
    def fields(self) -> Mapping[str, object]:
        return self._fields

    def get(self, name: str) -> object:
        return self._fields.get(name)

    def name_of(self, name: str) -> str:
        return self._prefix + name

    def wrong(self, name: str, problem: str) -> InvalidParameter:
        return InvalidParameter(self.name_of(name), problem)

    def object(self, name: str) -> Mapping[str, object]:
        value = self._fields.get(name)
        if not isinstance(value, dict | None):
            raise self.wrong(name, "must be an object")
        return value or {}

    def inner(self, name: str) -> "Body":
        return Body(self.object(name), f"{self.name_of(name)}.")

    def items(self, name: str) -> "list[Any]":
        """Return the list, or an empty one for none. Its length is checked before its items."""
        return check_list(self._fields.get(name), self.name_of(name))

    def objects(self, name: str) -> "list[Body]":
        own_name = self.name_of(name)
        return [_object(item, f"{own_name}[{index}]") for index, item in enumerate(self.items(name))]

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        return "" if value is None else check_text(value, self.name_of(name))

    def required_text(self, name: str) -> str:
        return check_text(self._fields.get(name), self.name_of(name))

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._fields.get(name)
        return None if value is None else check_integer(value, self.name_of(name), low, high)

    def max_tokens(self, name: str) -> int | None:
        return self.integer(name, -INT32_MAX, INT32_MAX)

    def number(self, name: str) -> float | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        # This is far beyond any range that is checked later, and still a float32.
        if abs(value) > 1e30 or math.isnan(value):
            raise self.wrong(name, "is out of range")
        return float(value)

    def integers(self, name: str) -> list[int]:
        value = self._fields.get(name)
        return [] if value is None else check_ids(value, self.name_of(name))


def _object(value: object, name: str) -> Body:
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    return Body(value, f"{name}.")


def check_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list | None):
        raise InvalidParameter(name, "must be a list")
    if len(value or ()) > _MOST_OBJECTS:
        raise InvalidParameter(name, f"must be at most {_MOST_OBJECTS} items")
    return value or []


def json_text(value: object, name: str) -> str:
    try:
        _check_nesting(value, _MOST_NESTED)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (RecursionError, ValueError) as error:
        raise InvalidParameter(
            name, "cannot be written as JSON: it is nested too deeply, or has a NaN"
        ) from error
    return check_text(text, name)


def _check_nesting(value: object, left: int) -> None:
    if isinstance(value, dict | list):
        if not left:
            raise RecursionError
        for each in value.values() if isinstance(value, dict) else value:
            _check_nesting(each, left - 1)


def check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(name, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(name, "holds half of a surrogate pair, which is no text") from error
    return value


def check_integer(value: object, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, "must be an integer")
    if not low <= value <= high:
        raise InvalidParameter(name, f"must be between {low} and {high}")
    return value


def check_ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidParameter(name, "must be a list of token ids")
    # There may be millions of ids: only the first wrong one gets a name.
    if not (set(map(type, value)) <= {int} and _fit(value)):
        index = next(index for index, item in enumerate(value) if not _is_id(item))
        check_integer(value[index], f"{name}[{index}]", 0, UINT32_MAX)
    return value


def _fit(integers: list[int]) -> bool:
    try:
        array("I", integers)
    except OverflowError:
        return False
    return True


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= UINT32_MAX


IMAGE_LEFT_OUT = "[image left out: this model reads text]"
# These are the part types of chat completions, responses and messages.
_IMAGES = ("image_url", "input_image", "image")
_HOLDERS = ("content", "output")  # These members of a message, block or item hold its parts.
_MOST_HELD = 8  # No API nests deeper.


def without_images(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return a body whose messages or input have a fixed text instead of each image, also in the results of
    tools.

    The text is always the same, so that a growing history keeps its prefix. A malformed part stays as it is.
    """
    changed = {name: _without_images(fields[name]) for name in ("messages", "input") if name in fields}
    return {**fields, **changed}


def _without_images(value: object, left: int = _MOST_HELD) -> object:
    if isinstance(value, list):
        return [_without_images(each, left) if isinstance(each, dict) else each for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in _IMAGES:
        return {"type": "text", "text": IMAGE_LEFT_OUT}
    held = {name: _without_images(value[name], left - 1) for name in _HOLDERS if name in value and left}
    return {**value, **held} if held else value
