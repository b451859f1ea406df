"""Our service and SGLang's processes say this to each other: one line of JSON per message. All is pure."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from services.values.errors import ProtocolError

MAX_LINE_BYTES = 64 << 20

Kinds = Mapping[str, type[Any]]


def kinds_of(*classes: type[Any]) -> Kinds:
    return {cls.__name__: cls for cls in classes}


def encode(message: Any) -> bytes:
    told = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps({"kind": type(message).__name__, **told}).encode() + b"\n"


def decode(line: bytes, kinds: Kinds) -> Any:
    """Return the message. Raises ProtocolError."""
    try:
        told = json.loads(line.decode())
        return kinds[told.pop("kind")](**told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"a line that is none of {', '.join(kinds)}: {type(error).__name__}") from error


class LineSplitter:
    """Bytes, as they come, become whole lines. One that is too long loses what came first: nobody can read
    it."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []  # A line without its end is here.
        self._begun_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        *whole, rest = received.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._begun, whole[0]])
            self._begun, self._begun_bytes = [], 0
        if self._begun_bytes + len(rest) > MAX_LINE_BYTES:
            self._begun, self._begun_bytes = [], 0
        if rest:
            self._begun.append(rest)
            self._begun_bytes += len(rest)
        return whole

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)
