"""Bodies of OpenAI's chat/completions and completions, read into GenerateRequest.

What is read here is checked for its type and for fitting the message; ranges are SamplingParams' business.
Parameters that we do not know are ignored, but for those of openai_refused.py.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from services.observe import traces
from services.router.openai import refused as openai_refused
from services.router.openai.request_id import REQUEST_ID
from services.router.openai.sampling_defaults import SamplingDefaults
from services.values.errors import InvalidRequest
from services.values.request import MAX_ID_CHARS, MAX_STOP_STRINGS, is_id
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest

_Number = TypeVar("_Number", int, float)

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
# OpenAI's own default for completions; chats run until they end.
_COMPLETION_MAX_TOKENS = 16


class InvalidParameter(InvalidRequest):
    """`param` is the parameter's name in the body; the message begins with it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """What the client asks for, and how it wants the answer."""

    request: GenerateRequest
    stream: bool
    include_usage: bool
    return_token_ids: bool
    traceparent: str  # "": the client sent none

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.request.sampling.HasField("logprobs"))


def read_chat_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> GenerationCall:
    """Raises InvalidParameter."""
    body = _Body(fields)
    body.refuse(openai_refused.IN_CHATS)
    max_tokens = body.max_tokens("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.max_tokens("max_tokens")
    sampling = _read_sampling(body, max_tokens, _read_chat_logprobs(body), defaults)
    chat = Chat(
        messages=_read_messages(fields.get("messages")), chat_template_kwargs=_read_template_kwargs(body)
    )
    request = GenerateRequest(chat=chat, sampling=sampling)
    return _make_call(body, headers, request)


def read_completion_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> GenerationCall:
    """Raises InvalidParameter."""
    body = _Body(fields)
    body.refuse(openai_refused.IN_COMPLETIONS)
    max_tokens = body.max_tokens("max_tokens")
    if max_tokens is None:
        max_tokens = _COMPLETION_MAX_TOKENS
    sampling = _read_sampling(body, max_tokens, body.integer("logprobs", 0, _UINT32_MAX), defaults)
    request = GenerateRequest(sampling=sampling)
    _read_prompt(fields.get("prompt"), request)
    if body.get("add_special_tokens") is not None:
        request.add_special_tokens = body.flag("add_special_tokens")
    return _make_call(body, headers, request)


class _Body:
    """Typed reads of a JSON object's members. A null counts as absent, as it does with OpenAI."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def refuse(self, names: openai_refused.Refused, prefix: str = "") -> None:
        """Raises InvalidParameter for a value of one of them that is none of its harmless ones."""
        for name, value in self._fields.items():
            harmless = (None, *names[name]) if name in names else (value,)
            # 1 == True in Python, but not in JSON.
            if not any(type(value) is type(ok) and value == ok for ok in harmless):
                instead = openai_refused.INSTEAD.get(name, "leave it out")
                raise InvalidParameter(prefix + name, f"is not supported by this server; {instead}")

    def get(self, name: str) -> object:
        return self._fields.get(name)

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        return "" if value is None else _check_text(value, name)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidParameter(name, "must be true or false")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._fields.get(name)
        return None if value is None else _check_integer(value, name, low, high)

    def max_tokens(self, name: str) -> int | None:
        return self.integer(name, -_INT32_MAX, _INT32_MAX)

    def number(self, name: str) -> float | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameter(name, "must be a number")
        # Far beyond any range below, and still a float32.
        if abs(value) > 1e30 or math.isnan(value):
            raise InvalidParameter(name, "is out of range")
        return float(value)

    def integers(self, name: str) -> list[int]:
        value = self._fields.get(name)
        return [] if value is None else _check_ids(value, name)


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(name, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(name, "holds half of a surrogate pair, which is no text") from error
    return value


def _check_integer(value: object, name: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, "must be an integer")
    if not low <= value <= high:
        raise InvalidParameter(name, f"must be between {low} and {high}")
    return value


def _check_ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidParameter(name, "must be a list of token ids")
    # There may be millions: only the first that is wrong is given a name.
    are_integers = set(map(type, value)) <= {int}
    if not (are_integers and _is_id(min(value, default=0)) and _is_id(max(value, default=0))):
        index = next(index for index, item in enumerate(value) if not _is_id(item))
        _check_integer(value[index], f"{name}[{index}]", 0, _UINT32_MAX)
    return value


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _UINT32_MAX


def _read_sampling(
    body: _Body, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
) -> SamplingParams:
    temperature = _either(body.number("temperature"), defaults.temperature)
    top_k = _either(body.integer("top_k", -1, _UINT32_MAX), defaults.top_k)
    seed = body.integer("seed", -(2**63), 2**64 - 1)
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=_either(body.number("top_p"), defaults.top_p),
        top_k=0 if top_k == -1 else top_k,  # other servers' way to say "all"
        min_p=_either(body.number("min_p"), defaults.min_p),
        seed=None if seed is None else seed % 2**64,
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", -_INT32_MAX, _INT32_MAX),
        stop=_read_stop(body.get("stop")),
        stop_token_ids=body.integers("stop_token_ids"),
        ignore_eos=body.flag("ignore_eos"),
        frequency_penalty=body.number("frequency_penalty"),
        presence_penalty=body.number("presence_penalty"),
        repetition_penalty=_either(body.number("repetition_penalty"), defaults.repetition_penalty),
        logprobs=logprobs,
    )


def _either(given: _Number | None, default: _Number | None) -> _Number | None:
    return default if given is None else given


def _read_stop(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        if len(value) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"must be at most {MAX_STOP_STRINGS} strings")
        return [_check_text(item, f"stop[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return [_check_text(value, "stop")]
    raise InvalidParameter("stop", "must be a string or a list of strings")


def _read_chat_logprobs(body: _Body) -> int | None:
    top_logprobs = body.integer("top_logprobs", 0, _UINT32_MAX)
    if body.flag("logprobs"):
        return top_logprobs or 0
    if top_logprobs:  # 0 asks for none
        raise InvalidParameter("top_logprobs", "needs logprobs to be true")
    return None


def _read_template_kwargs(body: _Body) -> str:
    """A reasoning_effort is one of them, as it is with vLLM and SGLang; "none" switches thinking off."""
    name = "chat_template_kwargs"
    given = body.get(name)
    if not isinstance(given, dict | None):
        raise InvalidParameter(name, "must be an object")
    effort = body.text("reasoning_effort")
    variables: dict[str, object] = {"reasoning_effort": effort} if effort else {}
    if effort == "none":
        variables["enable_thinking"] = False
    variables |= given or {}
    try:
        return _check_text(json.dumps(variables, ensure_ascii=False), name) if variables else ""
    except RecursionError as error:
        raise InvalidParameter(name, "is nested too deeply") from error


def _read_messages(value: object) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise InvalidParameter("messages", "must be a list of at least one message")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _read_message(value: object, name: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    if value.get("tool_calls") or value.get("function_call"):
        raise InvalidParameter(f"{name}.tool_calls", "is not supported by this server; leave it out")
    _Body(value).refuse(openai_refused.IN_MESSAGES, f"{name}.")
    token_ids = value.get("token_ids")
    content = _read_content(value.get("content"), f"{name}.content")
    return ChatMessage(
        role=_check_text(value.get("role"), f"{name}.role"),
        content=content if isinstance(content, str) else "",
        parts=content if isinstance(content, list) else [],
        token_ids=[] if token_ids is None else _check_ids(token_ids, f"{name}.token_ids"),
    )


def _read_content(value: object, name: str) -> str | list[str]:
    """Its text, or the texts of its parts."""
    if value is None:
        return ""
    if isinstance(value, list):
        return [_read_text_part(part, f"{name}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, str):
        return _check_text(value, name)
    raise InvalidParameter(name, "must be a string or a list of text parts")


def _read_text_part(part: object, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidParameter(name, 'must be a part of type "text"; this server reads no other')
    return _check_text(part.get("text"), f"{name}.text")


def _read_prompt(value: object, request: GenerateRequest) -> None:
    name = "prompt"
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        name, value = "prompt[0]", value[0]  # a batch of one
    if isinstance(value, str):
        request.text = _check_text(value, name)
        return
    if not isinstance(value, list) or not {str, list}.isdisjoint(map(type, value)):
        raise InvalidParameter(
            name, "must be one string or one list of token ids; send a request for each of several"
        )
    request.token_ids.SetInParent()  # an empty one too
    request.token_ids.ids.extend(_check_ids(value, name))


def _make_call(body: _Body, headers: Mapping[str, str], request: GenerateRequest) -> GenerationCall:
    request.model = body.text("model")
    request.request_id = headers.get(REQUEST_ID, "")
    request.tenant = _read_tenant(body.text("cache_salt"), headers.get("x-isthmus-tenant", ""))
    request.conversation_id = headers.get("x-isthmus-conversation") or body.text("conversation_id")
    stream = body.flag("stream")
    return GenerationCall(
        request,
        stream,
        _read_include_usage(body.get("stream_options"), stream),
        body.flag("return_token_ids"),
        headers.get(traces.TRACEPARENT, ""),
    )


def _read_tenant(cache_salt: str, of_header: str) -> str:
    """vLLM's cache_salt is what a tenant is here; where both are given they must be the same, for neither may
    be left out: who set the header keeps tenants apart, and so does who set the salt."""
    if cache_salt and of_header and cache_salt != of_header:
        raise InvalidParameter(
            "cache_salt", "differs from the header x-isthmus-tenant; leave one of them out"
        )
    if not is_id(cache_salt):
        raise InvalidParameter("cache_salt", f"must be at most {MAX_ID_CHARS} printable characters")
    return of_header or cache_salt


def _read_include_usage(stream_options: object, stream: bool) -> bool:
    if stream_options is None:
        return False
    if not stream:
        raise InvalidParameter("stream_options", "needs stream to be true")
    if not isinstance(stream_options, dict):
        raise InvalidParameter("stream_options", "must be an object")
    return _Body(stream_options).flag("include_usage")
