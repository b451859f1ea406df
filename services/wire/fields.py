"""Our values and messages have fields in common: these are copied by name, and only the others are
translated.

Messages and enums within a message belong to the others: each has a translation of its own (convert.py).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from services.values.errors import ProtocolError

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")

_NOT_PLAIN = (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_ENUM)


@dataclass(frozen=True, slots=True)
class SharedFields:
    """These are the fields that a message and a dataclass share, computed once for each pair of types."""

    all: tuple[str, ...]
    names: Mapping[FieldDescriptor, str]
    unset: Mapping[str, Any]  # Unset fields have these values, except for optional ones.
    repeated: frozenset[str]


@cache
def shared_fields(kind: type[Any], message: Descriptor) -> SharedFields:
    names = {member.name for member in fields(kind)}
    shared = [f for f in message.fields if f.name in names and f.cpp_type not in _NOT_PLAIN]
    return SharedFields(
        tuple(f.name for f in shared),
        {f: f.name for f in shared},
        {f.name: () if f.is_repeated else f.default_value for f in shared if not f.has_presence},
        frozenset(f.name for f in shared if f.is_repeated),
    )


def message_of(message: type[_Message], value: Any, /, **otherwise: Any) -> _Message:
    """Return a `message` with the value's fields, none for a None; `otherwise` has the other fields."""
    kind: type = type(value)
    names = shared_fields(kind, message.DESCRIPTOR).all
    made: _Message = message(**{n: getattr(value, n) for n in names if n not in otherwise}, **otherwise)
    return made


def value_of(kind: type[_Value], pb: Message, /, **otherwise: Any) -> _Value:
    """Return a `kind` with the message's fields; `otherwise` has the others. Raises ProtocolError for a
    number that is not finite.
    """
    given = given_fields(kind, pb, but=otherwise)
    for name, value in given.items():
        if type(value) is float and not math.isfinite(value):
            finite(f"{pb.DESCRIPTOR.name}.{name}", value)
    return kind(**given, **otherwise)


def given_fields(kind: type, pb: Message, *, but: Iterable[str] = ()) -> dict[str, Any]:
    """Return the message's fields by name, without unset optional ones: only the dataclass has defaults."""
    shared = shared_fields(kind, pb.DESCRIPTOR)
    names, given = shared.names, dict(shared.unset)
    for field, value in pb.ListFields():  # Only a few of dozens are set.
        if (name := names.get(field)) is not None:
            given[name] = tuple(value) if name in shared.repeated else value
    for name in but:
        given.pop(name, None)
    return given


def finite(field_name: str, value: float) -> float:
    """Return `value`. Raises ProtocolError for a NaN or an infinity, which would break comparisons."""
    if not math.isfinite(value):
        raise ProtocolError(f"{field_name} must be finite, got {value!r}")
    return value
