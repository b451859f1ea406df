"""This module reads messages of the API into dataclasses with the same field names."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

_Value = TypeVar("_Value")
_Read = Callable[[Message], Any]


def read(kind: type[_Value], message: Message) -> _Value:
    """Return a `kind` with the message's fields. An enum becomes its name without the prefix
    (FINISH_REASON_STOP is "stop"); an unset field is None if its type allows that.
    """
    return kind(
        **{name: reader(message) for name, reader in _readers(kind, message.DESCRIPTOR.full_name, message)}
    )


_Readers = tuple[tuple[str, _Read], ...]
_KNOWN: dict[tuple[type[Any], str], _Readers] = {}


def _readers(kind: type[Any], name: str, message: Message) -> _Readers:
    """Return a reader for each field, computed once for each pair of types."""
    if (kind, name) not in _KNOWN:
        hints, described = get_type_hints(kind), message.DESCRIPTOR.fields_by_name
        shared = [member.name for member in fields(kind) if member.name in described]
        _KNOWN[kind, name] = tuple((each, _reader(described[each], hints[each])) for each in shared)
    return _KNOWN[kind, name]


def _reader(field: FieldDescriptor, hint: Any) -> _Read:
    name = field.name
    if get_origin(hint) is UnionType:
        (hint,) = [each for each in get_args(hint) if each is not NoneType]
        whole = _of_one(field, hint)
        return lambda message: whole(getattr(message, name)) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        each = _of_one(field, get_args(hint)[0])
        return lambda message: tuple(map(each, getattr(message, name)))
    if get_origin(hint) is not None:  # The field is a Mapping of plain values.
        return lambda message: dict(getattr(message, name))
    one = _of_one(field, hint)
    return lambda message: one(getattr(message, name))


def _of_one(field: FieldDescriptor, hint: Any) -> Callable[[Any], Any]:
    if is_dataclass(hint):
        kind: type[Any] = hint  # type: ignore[assignment]
        return lambda message: read(kind, message)
    if field.enum_type is not None:
        return enum_names(field.enum_type).__getitem__
    return lambda value: value


@cache
def enum_names(enum: EnumDescriptor) -> dict[int, str]:
    prefix = "".join(f"_{c}" if c.isupper() else c for c in enum.name).upper().removeprefix("_") + "_"
    names = {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}
    return names | {0: ""}
