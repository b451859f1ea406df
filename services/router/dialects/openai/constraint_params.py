"""A body constrains the answer's text in the words of several servers.

response_format                      OpenAI's: text, json_object, json_schema
guided_json, _regex, _choice, _grammar; structured_outputs       vLLM's
json_schema, regex, ebnf             SGLang's
grammar                              llama.cpp's
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from services.router.dialects.json_body import Body, InvalidParameter, check_text, json_text
from services.wire.isthmus.v1.common_pb2 import Choice, Constraint


@dataclass(frozen=True, slots=True)
class NamedConstraint:
    param: str
    constraint: Constraint


def read_constraint(body: Body, own: NamedConstraint | None = None) -> NamedConstraint | None:
    """Return the constraint, or None where none is requested.

    `own` is what the body says of it in words of an API of its own. Raises InvalidParameter, also where more
    than one is requested.
    """
    asked = [*([own] if own is not None else ()), *_asked(body)]
    if len(asked) > 1:
        raise InvalidParameter(asked[1].param, f"cannot be used beside {asked[0].param}")
    return asked[0] if asked else None


def _asked(body: Body) -> Iterator[NamedConstraint]:
    if (of_format := _read_format(body.get("response_format"))) is not None:
        yield of_format
    for name, read in _READERS.items():
        if (value := body.get(name)) is not None and (name, value) != ("grammar", ""):
            param = body.name_of(name)
            yield NamedConstraint(param, read(value, param))
    if (structured := body.get("structured_outputs")) is not None:
        yield from _read_structured(structured)


def _read_format(value: object) -> NamedConstraint | None:
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return NamedConstraint(name, Constraint(json_object=True))
        case "json_schema":
            return NamedConstraint(name, read_schema(_schema_of(value), f"{name}.json_schema.schema"))
    raise InvalidParameter(f"{name}.type", "must be text, json_object or json_schema")


def _schema_of(value: Mapping[str, object]) -> object:
    """Return the schema, which is kept to whether it is `strict` or not. It has a name and a description for
    models elsewhere."""
    held = value.get("json_schema")
    if not isinstance(held, dict):
        raise InvalidParameter("response_format.json_schema", "must be an object")
    return held.get("schema")


def read_schema(value: object, name: str) -> Constraint:
    """Read an object, or its JSON. Whether that is a schema is looked at where all requests are."""
    if isinstance(value, str):
        return Constraint(json_schema=check_text(value, name))
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be a JSON schema")
    return Constraint(json_schema=json_text(value, name))


def _read_regex(value: object, name: str) -> Constraint:
    return Constraint(regex=check_text(value, name))


def _read_grammar(value: object, name: str) -> Constraint:
    return Constraint(grammar=check_text(value, name))


def _read_choice(value: object, name: str) -> Constraint:
    if not isinstance(value, list):
        raise InvalidParameter(name, "must be a list of strings")
    texts = [check_text(text, f"{name}[{index}]") for index, text in enumerate(value)]
    return Constraint(choice=Choice(texts=texts))


def _read_object(value: object, name: str) -> Constraint:
    if not isinstance(value, bool):
        raise InvalidParameter(name, "must be true or false")
    return Constraint(json_object=value)


_Reader = Callable[[object, str], Constraint]
_READERS: Mapping[str, _Reader] = {
    "guided_json": read_schema,
    "guided_regex": _read_regex,
    "guided_choice": _read_choice,
    "guided_grammar": _read_grammar,
    "json_schema": read_schema,
    "regex": _read_regex,
    "ebnf": _read_grammar,
    "grammar": _read_grammar,
}
_STRUCTURED: Mapping[str, _Reader] = {
    "json": read_schema,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
    "json_object": _read_object,
}
# This requests nothing else than is done here: no whitespace is written anyway.
_HARMLESS = {"disable_any_whitespace": (None, False, True), "disable_fallback": (None, False, True)}


def _read_structured(value: object) -> Iterator[NamedConstraint]:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    for key, given in value.items():
        param = f"{name}.{key}"
        if key in _STRUCTURED:
            if given is not None and given is not False:
                yield NamedConstraint(param, _STRUCTURED[key](given, param))
        elif given not in (None, False) and given not in _HARMLESS.get(key, ()):
            raise InvalidParameter(param, "is not supported by this server; leave it out")
