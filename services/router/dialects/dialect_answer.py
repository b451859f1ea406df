"""What an API's answers are made by.

GenerateResponse, joined     -> whole()   -> one JSON value
GenerateResponse, one by one -> events()  -> server-sent events; the last answer's last response ends them
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent one: its data, as JSON where it is no text, and its name if it has one."""

    data: Json | str
    name: str = ""


def json_text(data: Json) -> str:
    """As events have it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class Answer(Protocol):
    """Of one call, in the words of one API. Makes of the responses either a whole or events."""

    request: GenerateRequest  # what the router is asked for

    @property
    def ping(self) -> Event | None:
        """A stream says this while there is nothing to tell; None stands for a comment."""

    def whole(self, answers: Sequence[GenerateResponse]) -> Json | list[Json]:
        """Of each answer all responses in one, by their indexes. Raises Aborted for one that somebody
        stopped."""

    def events(self, response: GenerateResponse) -> list[Event]:
        """Of the next response, in order; none where it has nothing that a client sees. Raises as `whole`."""

    def failure(self, error: Exception) -> list[Event]:
        """What ends a stream that has begun."""
