"""This module reads bodies of OpenAI's responses into GenerateRequest.

The items of a response's input become turns of a chat, and those of its output a turn of the next chat:

    instructions                                           ->  system
    message of a system, developer or user                 ->  the same
    reasoning, message of the model, function_call, ...    ->  one assistant turn
    function_call_output                                   ->  tool
    item_reference                                         ->  what the stored item becomes
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.router.dialects import refused
from services.router.dialects.answer_parts import Kind, Part
from services.router.dialects.body_params import (
    NamedConstraint,
    check_chosen,
    read_constraint,
    read_function,
    read_schema,
    read_variables,
)
from services.router.dialects.dialect import Call, Json, read_addressee, traceparent_of
from services.router.dialects.json_body import INT32_MAX, Body, Refused, check_text, json_text
from services.router.dialects.sampling import read_sampling
from services.values.request import is_id
from services.wire.isthmus.v1.common_pb2 import Constraint
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, ToolCall, ToolChoice

_READ_HERE = (
    *("tools", "tool_choice", "instructions", "reasoning", "max_output_tokens", "previous_response_id"),
    "mcp_servers",
)
_REFUSED: Refused = {
    **{name: ok for name, ok in refused.IN_CHATS.items() if name not in _READ_HERE},
    **refused.CONTINUING,
    "n": (1,),
    "prompt_logprobs": (),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_token_ids": (False,),
    "reasoning_effort": (),
    "max_tokens": (),
    "messages": (),
    "response_format": (),
}
_INSTEAD = {
    **refused.INSTEAD,
    "conversation": "use previous_response_id",
    "prompt": "send its text as input and instructions",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "reasoning_effort": "use reasoning.effort",
    "messages": "use input, or /v1/chat/completions",
    "response_format": "use text.format",
}
# The answer would lack these. All other values of `include` request what it always holds, or what never
# exists here.
_REFUSED_INCLUDES = ("message.output_text.logprobs",)
_MODES = {
    "auto": ToolChoice.MODE_AUTO,
    "none": ToolChoice.MODE_NONE,
    "required": ToolChoice.MODE_REQUIRED,
}
_MOST_METADATA, _MOST_METADATA_KEY, _MOST_METADATA_VALUE = 16, 64, 512  # These limits are OpenAI's.
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "service_tier", "user"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(Call):
    """The request's chat has only this response's input; the store has the turns before it."""

    instructions: str
    previous_id: str  # This is empty where there is none.
    is_stored: bool
    names_conversation: bool
    referring: tuple[Body, ...]  # These are the items of an input of which some refer to stored ones.
    echo: Json  # The response object repeats these members of the request.

    @property
    def references(self) -> list[str]:
        return _references(self.referring)


def read_responses_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> ResponsesCall:
    body = Body(fields)
    body.refuse(_REFUSED, _INSTEAD)
    _check_include(body)
    max_tokens = body.integer("max_output_tokens", 1, INT32_MAX)
    sampling = read_sampling(body, max_tokens, None)
    if (named := read_constraint(body, _read_format(body.inner("text")))) is not None:
        sampling.constraint.CopyFrom(named.constraint)
    chat = Chat(messages=read_input(body), chat_template_kwargs=_read_effort(body))
    left_out = _read_tools(body, chat)
    request = GenerateRequest(chat=chat, sampling=sampling)
    read_addressee(body, headers, request, body.text("prompt_cache_key"))
    return ResponsesCall(
        request=request,
        stream=body.flag("stream"),
        traceparent=traceparent_of(headers),
        constraint_param="" if named is None else named.param,
        left_out=left_out,
        instructions=body.text("instructions"),
        previous_id=body.text("previous_response_id"),
        is_stored=body.get("store") is None or body.flag("store"),
        names_conversation=bool(request.conversation_id),
        referring=_read_referring(body),
        echo=_echo(body),
    )


def _check_include(body: Body) -> None:
    include = body.get("include")
    if not isinstance(include, list | None):
        raise body.wrong("include", "must be a list")
    for name in include or ():
        if name in _REFUSED_INCLUDES:
            raise body.wrong("include", f"must not have {name!r}: this server does not report it here")


def _read_format(text: Body) -> NamedConstraint | None:
    form, name = text.inner("format"), text.name_of("format")
    match form.text("type"):
        case "" | "text":
            return None
        case "json_object":
            return NamedConstraint(name, Constraint(json_object=True))
        case "json_schema":
            return NamedConstraint(name, read_schema(form.get("schema"), form.name_of("schema")))
        case _:
            raise form.wrong("type", "must be one of text, json_object, json_schema")


def _read_effort(body: Body) -> str:
    effort = body.inner("reasoning").text("effort")
    return read_variables(body, False if effort == "none" else None, effort)


def _read_tools(body: Body, chat: Chat) -> tuple[str, ...]:
    left_out = []
    for tool in body.objects("tools"):
        if _is_offered(tool):
            chat.tools.append(read_function(tool))
        else:
            left_out.append(tool.text("type"))
    if body.get("tool_choice") is not None:
        _read_choice(body, chat)
    if body.get("parallel_tool_calls") is not None:
        chat.parallel_tool_calls = body.flag("parallel_tool_calls")
    return tuple(left_out)


def _is_offered(tool: Body) -> bool:
    return tool.required_text("type") == "function"


def _read_choice(body: Body, chat: Chat) -> None:
    value = body.get("tool_choice")
    if isinstance(value, str) and value in _MODES:
        chat.tool_choice.mode = _MODES[value]
        return
    if isinstance(value, str):
        raise body.wrong("tool_choice", f"must be one of {', '.join(_MODES)}, or an object")
    choice = body.inner("tool_choice")
    if choice.required_text("type") != "function":
        raise choice.wrong("type", 'must be "function": this server chooses among no others')
    chat.tool_choice.name = check_chosen(choice.required_text("name"), chat.tools, choice.name_of("name"))


def _echo(body: Body) -> Json:
    reasoning = body.inner("reasoning")
    echo: Json = {
        **{name: body.get(name) for name in _ECHOED},
        "metadata": _read_metadata(body),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": body.inner("text").get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [tool.fields for tool in body.objects("tools") if _is_offered(tool)],
        "truncation": "disabled",
        "background": False,
        "store": body.get("store") is None or body.flag("store"),
    }
    for name, value in echo.items():
        json_text(value, name)  # Most values are checked nowhere else.
    return echo


def _read_metadata(body: Body) -> Json:
    """Return the metadata within OpenAI's limits, as it is stored and sent several times."""
    metadata = body.object("metadata")
    fits = len(metadata) <= _MOST_METADATA and all(
        len(key) <= _MOST_METADATA_KEY and isinstance(value, str) and len(value) <= _MOST_METADATA_VALUE
        for key, value in metadata.items()
    )
    if not fits:
        sizes = f"{_MOST_METADATA_VALUE} characters, with names of {_MOST_METADATA_KEY}"
        raise body.wrong("metadata", f"must be at most {_MOST_METADATA} strings of {sizes}")
    return dict(metadata)


def turns_of(call: ResponsesCall) -> list[ChatMessage]:
    return list(call.request.chat.messages)


_SYSTEM_ROLES = ("system", "developer")
_ROLES = (*_SYSTEM_ROLES, "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_REFERENCE = "item_reference"


def read_input(body: Body) -> list[ChatMessage]:
    given = body.get("input")
    if isinstance(given, str):
        return [ChatMessage(role="user", content=check_text(given, "input"))]
    items = body.objects("input")
    if not items and not body.text("previous_response_id"):
        raise body.wrong("input", "must be a string or at least one item")
    return _read_items(items)


def _read_items(items: Iterable[Body]) -> list[ChatMessage]:
    turns = _Turns()
    for item in items:
        turns.add(item)
    return turns.all()


def _read_referring(body: Body) -> tuple[Body, ...]:
    """Return the input's items if some are references, else none. An item may be named once, as with OpenAI:
    so no body refers to more than what is stored."""
    items = () if isinstance(body.get("input"), str) else tuple(body.objects("input"))
    references = _references(items)
    if len(set(references)) < len(references):
        raise body.wrong("input", "must not refer to an item twice")
    return items if references else ()


def _references(items: Iterable[Body]) -> list[str]:
    return [item.text("id") for item in items if item.text("type") == _REFERENCE]


def put_stored_items(call: ResponsesCall, find: Callable[[Sequence[str]], Sequence[Json]]) -> None:
    """Read the input again, with stored items in the places of the references to them. `find` returns the
    items of these ids, and raises NotFound."""
    if not call.referring:
        return
    stored = map(Body, find(call.references))
    items = [next(stored) if item.text("type") == _REFERENCE else item for item in call.referring]
    del call.request.chat.messages[:]
    call.request.chat.messages.extend(_read_items(items))


def with_instructions(instructions: str, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    system = [ChatMessage(role="system", content=instructions)] if instructions else []
    return [*system, *turns]


class _Turns:
    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        # These are texts of the last turn, while it is the model's. They are joined once: a protobuf message
        # keeps the memory of a field's old values, so that appending to one field takes quadratic memory.
        self._answer_texts: list[str] = []
        self._thinking_texts: list[str] = []
        self._readers: Mapping[str, Callable[[Body], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
            _REFERENCE: lambda item: None,  # put_stored_items reads what is stored.
        }

    def all(self) -> list[ChatMessage]:
        self._close()
        return self._turns

    def add(self, item: Body) -> None:
        kind = item.text("type") or "message"
        if kind not in self._readers:
            raise item.wrong("type", f"is {kind!r}, which this server does not read; send the item itself")
        self._readers[kind](item)

    def _message(self, item: Body) -> None:
        role = item.required_text("role")
        if role not in _ROLES:
            raise item.wrong("role", f"must be one of {', '.join(_ROLES)}")
        parts = _texts(item, "content")
        if role == "assistant":
            self._model_turn()
            self._answer_texts += parts
        else:
            self._add_texts(ChatMessage(role=role), parts)

    def _reasoning(self, item: Body) -> None:
        turn = self._model_turn()
        if any(self._answer_texts) or turn.tool_calls:  # A turn begins with its thinking.
            turn = self._begin_model_turn()
        self._thinking_texts += [part.required_text("text") for part in item.objects("content")]
        handle = item.text("encrypted_content")
        # A handle that is not one of ours is ignored: the conversation may have begun on another server.
        turn.answer_id = handle if handle and is_id(handle) else turn.answer_id

    def _call(self, item: Body) -> None:
        call = ToolCall(
            id=item.required_text("call_id"),
            name=item.required_text("name"),
            arguments=item.required_text("arguments"),
        )
        self._model_turn().tool_calls.append(call)

    def _output(self, item: Body) -> None:
        turn = ChatMessage(role="tool", tool_call_id=item.required_text("call_id"))
        self._add_texts(turn, _texts(item, "output"))

    def _add_texts(self, turn: ChatMessage, parts: list[str]) -> None:
        if len(parts) == 1:
            turn.content = parts[0]
        else:
            turn.parts.extend(parts)
        self._close()
        self._turns.append(turn)

    def _model_turn(self) -> ChatMessage:
        is_open = bool(self._turns) and self._turns[-1].role == "assistant"
        return self._turns[-1] if is_open else self._begin_model_turn()

    def _begin_model_turn(self) -> ChatMessage:
        self._close()
        self._turns.append(ChatMessage(role="assistant"))
        return self._turns[-1]

    def _close(self) -> None:
        if self._answer_texts:
            self._turns[-1].content = "".join(self._answer_texts)
        if self._thinking_texts:
            self._turns[-1].reasoning = "".join(self._thinking_texts)
        self._answer_texts, self._thinking_texts = [], []


def _texts(item: Body, name: str) -> list[str]:
    if isinstance(item.get(name), str):
        return [item.text(name)]
    return [_text(part) for part in item.objects(name)]


def _text(part: Body) -> str:
    kind = part.required_text("type")
    if kind not in _TEXT_PARTS:
        raise part.wrong("type", f"is {kind!r}, which this server does not read; it reads text alone")
    return part.required_text("refusal" if kind == "refusal" else "text")


def turn_of(parts: Iterable[Part], answer_id: str) -> ChatMessage:
    turn = ChatMessage(role="assistant", answer_id=answer_id)
    for part in parts:
        match part.kind:
            case Kind.THINKING:
                turn.reasoning += part.text
            case Kind.TEXT:
                turn.content += part.text
            case Kind.CALL:
                turn.tool_calls.add(id=part.call_id, name=part.name, arguments=part.text)
    return turn
