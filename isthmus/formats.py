"""A format says what an answer's text must be, and how it becomes a value."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import InvalidRequest
from services.wire.isthmus.v1 import common_pb2

Parse = Callable[[str], Any]

NAMES = ("json_schema", "json_object", "regex", "grammar", "choice")


@dataclass(frozen=True, slots=True)
class Format:
    """`parse` makes a value of the text; None leaves the text as it is."""

    constraint: common_pb2.Constraint
    parse: Parse | None


def format_of(given: Mapping[str, Any]) -> Format | None:
    """Return the requested format, or None.

    The options are `json_schema` (a dict, its JSON, or a class such as pydantic's), `json_object`, `regex`,
    `grammar` and `choice` (a list of texts). Raises InvalidRequest if more than one is not None.
    """
    wanted = {name: given[name] for name in NAMES if given.get(name) not in (None, False)}
    if len(wanted) > 1:
        raise InvalidRequest(f"an answer has one format, not {' and '.join(wanted)}")
    for name, value in wanted.items():
        return _FORMATS[name](value)
    return None


def _json_schema(schema: Any) -> Format:
    if isinstance(schema, str):
        return Format(common_pb2.Constraint(json_schema=schema), json.loads)
    if isinstance(schema, Mapping):
        return Format(common_pb2.Constraint(json_schema=json.dumps(schema)), json.loads)
    if not hasattr(schema, "model_json_schema"):
        raise InvalidRequest(
            "json_schema is a dict, its JSON, or a class with model_json_schema, as pydantic's have"
        )
    text = json.dumps(schema.model_json_schema())
    return Format(common_pb2.Constraint(json_schema=text), getattr(schema, "model_validate_json", json.loads))


def _json_object(wanted: bool) -> Format:
    return Format(common_pb2.Constraint(json_object=wanted), json.loads)


def _regex(pattern: str) -> Format:
    return Format(common_pb2.Constraint(regex=pattern), None)


def _grammar(text: str) -> Format:
    return Format(common_pb2.Constraint(grammar=text), None)


def _choice(texts: Sequence[str]) -> Format:
    if isinstance(texts, str):
        raise InvalidRequest("choice is a list of texts, not one")
    return Format(common_pb2.Constraint(choice=common_pb2.Choice(texts=texts)), None)


_FORMATS: Mapping[str, Callable[[Any], Format]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}
