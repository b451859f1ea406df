"""One API's way to ask for a generation and to be answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.router.dialects.dialect_answer import Answer
from services.router.dialects.dialect_call import Call

CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer says of itself."""

    id: str  # random, of letters and digits: what an answer and its parts are named by
    model: str
    created: int  # seconds since the epoch


class Dialect(Protocol[CallT]):
    name: str  # in metrics

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> CallT:
        """May be called in any thread. Raises InvalidParameter."""

    def answer(self, call: CallT, envelope: Envelope) -> Answer:
        """Once for each call. Raises IsthmusError."""
