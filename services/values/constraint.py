"""A constraint says what the text of an answer must be; services/grammar says which tokens it allows."""

from dataclasses import dataclass
from enum import Enum

from services.values.errors import InvalidRequest

MAX_CONSTRAINT_BYTES = 65_536


class ConstraintKind(Enum):
    """The kinds are called as the fields of common.proto's Constraint are."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """`texts` are the alternatives of a choice, none of a JSON object, and otherwise the one schema, regular
    expression or grammar.

    Raises InvalidRequest, naming the field; whether a schema or a grammar can be kept to is not looked at.
    """

    kind: ConstraintKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size_bytes > MAX_CONSTRAINT_BYTES:
            raise self.refused(f"must be at most {MAX_CONSTRAINT_BYTES} bytes, got {self.size_bytes}")
        if self.kind is not ConstraintKind.JSON_OBJECT and not (self.texts and all(self.texts)):
            raise self.refused("must not be empty")

    @property
    def size_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)

    @property
    def field_name(self) -> str:
        return f"sampling.constraint.{self.kind.value}"

    @property
    def text(self) -> str:
        """Return the one text of a kind that has one."""
        (only,) = self.texts
        return only

    def refused(self, problem: str) -> InvalidRequest:
        return InvalidRequest(self.field_name, problem)
