"""An API's answers are made of the router's responses by this protocol.

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
    data: Json | str
    name: str = ""


def json_text(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


class Answer(Protocol):
    """Makes of the responses to one call either a whole or events, in the words of one API."""

    request: GenerateRequest  # The router gets this request.

    @property
    def ping(self) -> Event | None:
        """Return the event that a stream sends while there is nothing to report; None is a comment."""

    def whole(self, answers: Sequence[GenerateResponse]) -> Json | list[Json]:
        """Return the whole of each answer's joined responses, which come by their indexes. Raises Aborted
        where somebody stopped an answer."""

    def events(self, response: GenerateResponse) -> list[Event]:
        """Return the events of the next response, in order, or none where it has nothing that a client sees.
        Raises as `whole`."""

    def failure(self, error: Exception) -> list[Event]:
        """Return the events that end a stream which has begun."""
