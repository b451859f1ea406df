"""Typed reads of a JSON body: what is wrong is told by its name in the body."""

import math
from collections.abc import Mapping

from services.values.errors import InvalidRequest

Refused = Mapping[str, tuple[object, ...]]

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


class InvalidParameter(InvalidRequest):
    """`param` is the parameter's name in the body; the message begins with it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


class Body:
    """Typed reads of a JSON object's members. A null counts as absent, as it does with OpenAI."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def refuse(self, names: Refused, instead: Mapping[str, str], prefix: str = "") -> None:
        """Raises InvalidParameter for a value of one of them that is none of its harmless ones. `instead`: by
        name, what to do then."""
        for name, value in self._fields.items():
            harmless = (None, *names[name]) if name in names else (value,)
            # 1 == True in Python, but not in JSON.
            if not any(type(value) is type(ok) and value == ok for ok in harmless):
                advice = instead.get(name, "leave it out")
                raise InvalidParameter(prefix + name, f"is not supported by this server; {advice}")

    def get(self, name: str) -> object:
        return self._fields.get(name)

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        return "" if value is None else check_text(value, name)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidParameter(name, "must be true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._fields.get(name)
        return None if value is None else check_integer(value, name, low, high)

    def max_tokens(self, name: str) -> int | None:
        return self.integer(name, -INT32_MAX, INT32_MAX)

    def number(self, name: str) -> float | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameter(name, "must be a number")
        # Far beyond any range below, and still a float32.
        if abs(value) > 1e30 or math.isnan(value):
            raise InvalidParameter(name, "is out of range")
        return float(value)

    def integers(self, name: str) -> list[int]:
        value = self._fields.get(name)
        return [] if value is None else check_ids(value, name)


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
    # There may be millions: only the first that is wrong is given a name.
    are_integers = set(map(type, value)) <= {int}
    if not (are_integers and _is_id(min(value, default=0)) and _is_id(max(value, default=0))):
        index = next(index for index, item in enumerate(value) if not _is_id(item))
        check_integer(value[index], f"{name}[{index}]", 0, UINT32_MAX)
    return value


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= UINT32_MAX
