"""These functions read the parameters that several APIs share: the number of answers, the functions that may
be called, the chat template's variables, and the constraint on an answer's text.

A constraint is read from the parameters of several servers:

    response_format                      OpenAI's: text, json_object, json_schema
    guided_json, _regex, _choice, _grammar; structured_outputs       vLLM's
    json_schema, regex, ebnf             SGLang's
    grammar                              llama.cpp's
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.router.dialects.json_body import Body, InvalidParameter, check_text, json_text
from services.values.request import MAX_ID_CHARS
from services.wire.isthmus.v1.common_pb2 import Choice, Constraint
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, Tool

MAX_EACH = 128  # This is the limit of GenerateRequest.n.
MAX_PROMPTS = 256
MAX_ANSWERS = 1024  # This limits the answers of one call.
_MOST_BYTES = 64 << 20  # All copies of a call's body together are at most so large.


def read_n(body: Body, request: GenerateRequest) -> None:
    n = body.integer("n", 1, MAX_EACH)
    if n is not None:
        request.n = n


def read_best_of(body: Body, request: GenerateRequest, stream: bool) -> None:
    best_of = body.integer("best_of", 1, MAX_EACH)
    if best_of is None:
        return
    answered = request.n or 1
    if best_of < answered:
        raise body.wrong("best_of", f"must be at least n, which is {answered}")
    if stream and best_of > answered:
        raise body.wrong("best_of", "cannot be streamed where it is more than n: set stream to false")
    request.best_of = best_of


def check_number(num_prompts: int, param: str) -> None:
    if not 1 <= num_prompts <= MAX_PROMPTS:
        raise InvalidParameter(param, f"must be at most {MAX_PROMPTS} prompts, got {num_prompts}")


def one_for_each(num_prompts: int, request: GenerateRequest, param: str) -> list[GenerateRequest]:
    """Return one request for each of `num_prompts` prompts; the first is `request` itself.

    `param` is the name of the prompts in the body. Raises InvalidParameter where there is no prompt, or too
    many prompts, answers or bytes are requested.
    """
    check_number(num_prompts, param)
    num_answers = num_prompts * max(request.n or 1, request.best_of)
    if num_answers > MAX_ANSWERS:
        problem = f"with n or best_of asks for {num_answers} answers; a call gets {MAX_ANSWERS} at most"
        raise InvalidParameter(param, problem)
    if num_prompts * request.ByteSize() > _MOST_BYTES:  # Each request holds a copy of the body.
        problem = f"is {num_prompts} prompts, too many beside so long a body: send fewer at a time"
        raise InvalidParameter(param, problem)
    return [request, *(_another(request, place) for place in range(1, num_prompts))]


def _another(request: GenerateRequest, place: int) -> GenerateRequest:
    other = GenerateRequest()
    other.CopyFrom(request)
    if request.request_id:
        suffix = f"/{place}"
        other.request_id = request.request_id[: MAX_ID_CHARS - len(suffix)] + suffix
    return other


def read_function(function: Body, schema: str = "parameters") -> Tool:
    parameters = function.get(schema)
    if not isinstance(parameters, dict | None):
        raise function.wrong(schema, "must be an object: a JSON schema")
    return Tool(
        name=_read_name(function),
        description=function.text("description"),
        parameters="" if parameters is None else json_text(parameters, function.name_of(schema)),
        strict=function.flag("strict"),
    )


def _read_name(function: Body) -> str:
    name = function.required_text("name")
    if not name:
        raise function.wrong("name", "must not be empty")
    return name


def check_chosen(name: str, tools: Iterable[Tool], param: str) -> str:
    if name not in {tool.name for tool in tools}:
        raise InvalidParameter(param, f"names {name!r}, which is none of the request's functions")
    return name


_GIVEN = "chat_template_kwargs"


def read_variables(body: Body, thinks: bool | None, effort: str) -> str:
    """Return Chat's chat_template_kwargs as JSON. A None and a "" leave the template's own default.

    A variable that the body sets by name wins over the two arguments. Raises InvalidParameter.
    """
    variables: dict[str, object] = {}
    if thinks is not None:
        # Qwen and GLM read the first name, and DeepSeek reads the second.
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if effort:
        variables["reasoning_effort"] = effort
    variables |= body.object(_GIVEN)
    return json_text(variables, body.name_of(_GIVEN)) if variables else ""


@dataclass(frozen=True, slots=True)
class NamedConstraint:
    param: str
    constraint: Constraint


def read_constraint(body: Body, own: NamedConstraint | None = None) -> NamedConstraint | None:
    """Return the constraint, or None where none is requested.

    `own` is a constraint that was read from a parameter of one API alone. Raises InvalidParameter, also where
    more than one constraint is requested.
    """
    requested = [*([own] if own is not None else ()), *_requested(body)]
    if len(requested) > 1:
        raise InvalidParameter(requested[1].param, f"cannot be used beside {requested[0].param}")
    return requested[0] if requested else None


def _requested(body: Body) -> Iterator[NamedConstraint]:
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
    """Return the schema, which is kept even where `strict` is false. Its name is ignored."""
    held = value.get("json_schema")
    if not isinstance(held, dict):
        raise InvalidParameter("response_format.json_schema", "must be an object")
    return held.get("schema")


def read_schema(value: object, name: str) -> Constraint:
    """Read a schema, an object or its JSON text. Whether it is valid, a later check finds out."""
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
# These request what this server does anyway: it writes no optional whitespace.
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
