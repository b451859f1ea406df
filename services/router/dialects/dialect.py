"""A dialect is one API's way to ask for a generation and to be answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.router.dialects.dialect_answer import Answer
from services.router.dialects.dialect_call import Call

CallT = TypeVar("CallT", bound=Call)


@dataclass(frozen=True, slots=True)
class Envelope:
    id: str  # It is random and of letters and digits; an answer and its parts are named by it.
    model: str
    created: int  # It counts seconds since the epoch.


class Dialect(Protocol[CallT]):
    name: str  # Metrics have this name.

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> CallT:
        """Return the call that a body and its headers request. It may be called in any thread. Raises
        InvalidParameter."""

    def answer(self, call: CallT, envelope: Envelope) -> Answer:
        """Return what makes the one answer to a call. Raises IsthmusError."""
