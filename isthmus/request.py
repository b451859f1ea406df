"""A request is given as keyword arguments, and becomes the API's message."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from isthmus.errors import InvalidRequest
from isthmus.formats import NAMES as FORMATS
from isthmus.formats import Parse, format_of
from isthmus.functions import AnyTool, tool_of
from isthmus.values.message import Message, message_of, message_to_proto, tool_to_proto
from services.wire.isthmus.v1 import common_pb2, generation_pb2

MAX_ID_CHARS = 128  # This is the router's limit.


class Sampling(TypedDict, total=False):
    """Options by which tokens are chosen; common.proto documents them.

    An option that is absent or None has the value of the model's generation_config.json, if the router uses
    that, and otherwise no effect.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    include_stop_str_in_output: bool
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    json_schema: Any  # This is a dict, its JSON, or a class with model_json_schema.
    json_object: bool
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None


class Options(Sampling, total=False):
    """Further options of a request. Those of chats are refused with other prompts."""

    model: str
    conversation_id: str
    tenant: str
    request_id: str  # The client draws one by default.
    priority: int
    add_special_tokens: bool | None  # This is only for a text prompt.
    n: int | None
    best_of: int | None
    tools: Sequence[AnyTool] | None
    tool_choice: str | None  # This is auto, none, required, or a tool's name.
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    raw_answer: bool
    continue_final_message: bool
    timeout: float | None  # This is in seconds, for all attempts together.


Messages = Sequence[Message | Mapping[str, Any]]


class PromptOptions(Options, total=False):
    """Options of a request with the prompt among them, if that is no plain text."""

    messages: Messages | None
    token_ids: Sequence[int] | None


_SAMPLING = frozenset(Sampling.__annotations__)
_OF_CHATS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "raw_answer",
    "continue_final_message",
)
_OF_REQUESTS = (
    "model",
    "conversation_id",
    "tenant",
    "priority",
    "add_special_tokens",
    "n",
    "best_of",
)
_KNOWN = frozenset(Options.__annotations__)
_MODES = {
    "auto": generation_pb2.ToolChoice.MODE_AUTO,
    "none": generation_pb2.ToolChoice.MODE_NONE,
    "required": generation_pb2.ToolChoice.MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt is a text, a chat or ids. Raises InvalidRequest unless exactly one is given."""

    text: str | None = None
    messages: Messages | None = None
    token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.text, self.messages, self.token_ids) if each is not None]
        if len(given) != 1:
            raise InvalidRequest("give a prompt, or messages, or token_ids: one of them")


def prompt_and_options(text: str | None, options: PromptOptions) -> tuple[Prompt, Options]:
    """Take the prompt out of the options, which change. Raises InvalidRequest as Prompt does."""
    return Prompt(text, options.pop("messages", None), options.pop("token_ids", None)), options


@dataclass(frozen=True, slots=True)
class Call:
    """`parse` makes a value of the answer's text; None leaves the text as it is."""

    request: generation_pb2.GenerateRequest
    parse: Parse | None

    def attempt(self, number: int) -> generation_pb2.GenerateRequest:
        """Return the request of attempt `number`, from 0. Each has an id of its own, as an earlier attempt
        may still run.
        """
        if number == 0:
            return self.request
        again, suffix = generation_pb2.GenerateRequest(), f".{number + 1}"
        again.CopyFrom(self.request)
        again.request_id = self.request.request_id[: MAX_ID_CHARS - len(suffix)] + suffix
        return again


def call_of(prompt: Prompt, options: Mapping[str, Any]) -> Call:
    """Return the call for an answer to the prompt.

    `options` are those of Options without the timeout. Raises InvalidRequest that names the mistake.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(set(given) - _KNOWN):
        raise InvalidRequest(f"there is no option {', '.join(unknown)}")
    made = {name: given[name] for name in _OF_REQUESTS if name in given}
    request = _message(generation_pb2.GenerateRequest, made, "")
    request.request_id = given.get("request_id") or secrets.token_hex(8)
    _put_prompt(request, prompt, given)
    wanted = format_of(given)
    plain = {name: given[name] for name in _SAMPLING.intersection(given).difference(FORMATS)}
    if isinstance(plain.get("stop"), str):
        plain["stop"] = [plain["stop"]]
    request.sampling.CopyFrom(_message(common_pb2.SamplingParams, plain, "sampling."))
    if wanted is not None:
        request.sampling.constraint.CopyFrom(wanted.constraint)
    return Call(request, None if wanted is None else wanted.parse)


def _message(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    """Return the message. Raises InvalidRequest with the field's name, which protobuf's own errors lack."""
    made = kind()
    for name, value in given.items():
        try:
            made.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"{where}{name} cannot be {value!r}: {error}") from error
    return made


def _put_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt, given: Mapping[str, Any]) -> None:
    try:
        if prompt.messages is not None:
            request.chat.CopyFrom(_chat(prompt.messages, given))
            return
        if misplaced := [name for name in _OF_CHATS if given.get(name)]:
            raise InvalidRequest(f"{', '.join(misplaced)}: of chats alone; give messages")
        if prompt.text is not None:
            request.text = prompt.text
        else:
            request.token_ids.ids.extend(prompt.token_ids or ())
            request.token_ids.SetInParent()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the prompt cannot be sent: {error}") from error


def _chat(messages: Messages, given: Mapping[str, Any]) -> generation_pb2.Chat:
    turns = [message_of(message, f"messages[{index}]") for index, message in enumerate(messages)]
    variables = given.get("chat_template_kwargs")
    chat = generation_pb2.Chat(
        messages=map(message_to_proto, turns),
        tools=[tool_to_proto(tool_of(tool)) for tool in given.get("tools", ())],
        chat_template_kwargs=json.dumps(variables) if variables else "",
        raw_answer=given.get("raw_answer", False),
        continue_final_message=given.get("continue_final_message", False),
        parallel_tool_calls=given.get("parallel_tool_calls"),
    )
    if (choice := given.get("tool_choice")) is not None:
        named = generation_pb2.ToolChoice(name=choice) if choice not in _MODES else None
        chat.tool_choice.CopyFrom(named or generation_pb2.ToolChoice(mode=_MODES[choice]))
    return chat
