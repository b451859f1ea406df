"""This module reads bodies of Anthropic's messages into GenerateRequest, and the messages into turns of a
chat.

a user's      tool_result, tool_result, text, text  ->  tool, tool, user
a model's     thinking, text, tool_use              ->  assistant, with its reasoning and calls

A tool with `defer_loading` is shown and may be called once a result refers to it (tool_reference), which a
client's search for tools does. So the tools before the chat stay the same, and with them every prefix.

Parameters that only control caching (cache_control, betas, metadata) change no answer and are ignored: the
router caches every prompt.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from services.router.dialects import refused
from services.router.dialects.body_params import (
    NamedConstraint,
    check_chosen,
    read_constraint,
    read_function,
    read_schema,
    read_variables,
)
from services.router.dialects.dialect import Call, read_addressee, traceparent_of
from services.router.dialects.json_body import (
    INT32_MAX,
    Body,
    InvalidParameter,
    Refused,
    check_text,
    json_text,
)
from services.router.dialects.sampling import read_sampling, read_stop
from services.values.request import is_id
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Tool,
    ToolCall,
    ToolChoice,
)

_READ_HERE = (
    *("system", "thinking", "tools", "tool_choice", "stop_sequences", "output_config", "output_format"),
)
_REFUSED: Refused = {
    **{name: ok for name, ok in refused.IN_CHATS.items() if name not in _READ_HERE},
    **refused.CONTINUING,
    "n": (1,),
    "prompt_logprobs": (),
    "container": (),
    "stop": (),
    "response_format": (),
    "max_completion_tokens": (),
    "reasoning_effort": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_token_ids": (False,),
}
_INSTEAD = {
    **refused.INSTEAD,
    "stop": "use stop_sequences",
    "response_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort",
}
_MODES = {
    "auto": ToolChoice.MODE_AUTO,
    "any": ToolChoice.MODE_REQUIRED,
    "none": ToolChoice.MODE_NONE,
}
_THINKS: Mapping[str, bool | None] = {"": False, "disabled": False, "enabled": True, "adaptive": None}
_SESSION = "_session_"
_SESSION_ID = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesCall(Call):
    shows_thinking: bool  # Thinking that was not requested is no part of the answer.
    omits_thinking: bool  # The answer has a part for thinking, but without its text.


def read_messages_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> MessagesCall:
    body = Body(fields)
    body.refuse(_REFUSED, _INSTEAD)
    if body.get("max_tokens") is None:
        raise body.wrong("max_tokens", "must be set")
    return _read_call(body, headers, _read_sampling(body))


def read_count_request(fields: Mapping[str, object], headers: Mapping[str, str]) -> GenerateRequest:
    """Read a body of count_tokens: a message's, which may lack most members. Raises InvalidParameter."""
    return _read_call(Body(fields), headers, SamplingParams()).request


def _read_sampling(body: Body) -> SamplingParams:
    sampling = read_sampling(body, body.integer("max_tokens", 1, INT32_MAX), None)
    sampling.stop.extend(read_stop(body.get("stop_sequences"), "stop_sequences"))
    return sampling


def _read_format(body: Body) -> NamedConstraint | None:
    """Return the constraint. Anthropic's beta called the parameter `output_format`."""
    output = body.inner("output_config")
    holder, name = (output, "format") if output.get("format") is not None else (body, "output_format")
    if holder.get(name) is None:
        return None
    form = holder.inner(name)
    if form.required_text("type") != "json_schema":
        raise form.wrong("type", 'must be "json_schema"')
    return NamedConstraint(holder.name_of(name), read_schema(form.get("schema"), form.name_of("schema")))


def _read_call(body: Body, headers: Mapping[str, str], sampling: SamplingParams) -> MessagesCall:
    thinking = body.inner("thinking")
    kind = thinking.text("type")
    if kind not in _THINKS or (not kind and body.get("thinking") is not None):
        raise thinking.wrong("type", "must be one of enabled, disabled, adaptive")
    tools = _Tools(body)
    chat = Chat(
        messages=read_turns(body, tools),
        chat_template_kwargs=read_variables(body, _THINKS[kind], body.inner("output_config").text("effort")),
    )
    chat.continue_final_message = chat.messages[-1].role == "assistant"
    chat.tools.extend(tools.callable())
    if body.get("tool_choice") is not None:
        _read_choice(body.inner("tool_choice"), chat)
    if (named := read_constraint(body, _read_format(body))) is not None:
        sampling.constraint.CopyFrom(named.constraint)
    request = GenerateRequest(chat=chat, sampling=sampling)
    read_addressee(body, headers, request, _session(body.inner("metadata").text("user_id")))
    return MessagesCall(
        request=request,
        stream=body.flag("stream"),
        traceparent=traceparent_of(headers),
        left_out=tools.left_out,
        constraint_param="" if named is None else named.param,
        shows_thinking=_THINKS[kind] is not False,
        omits_thinking=thinking.text("display") == "omitted",
    )


_CUSTOM = "custom"
_SEARCH = "tool_search_tool_"  # This is a search by Anthropic's server.


class _Tools:
    """This class knows a body's tools, and which of them its messages refer to.

    Nothing is deferred if the server is to search for tools: here none would ever be found.
    """

    def __init__(self, body: Body) -> None:
        kinds = [(tool.text("type") or _CUSTOM, tool) for tool in body.objects("tools")]
        self.left_out = tuple(kind for kind, _ in kinds if kind != _CUSTOM)
        self._custom = [(tool.required_text("name"), tool) for kind, tool in kinds if kind == _CUSTOM]
        self._by_name = dict(self._custom)
        self._found: set[str] = set()
        self._may_defer = not any(kind.startswith(_SEARCH) for kind in self.left_out)

    def shown(self, reference: Body) -> str:
        """Return the text for a tool_reference: the tool's definition, as Claude Code tells a model to expect
        it, and its name alone if it has been shown before. Raises InvalidParameter."""
        name = reference.required_text("tool_name")
        if name not in self._by_name:
            raise reference.wrong("tool_name", f"names {name!r}, which is none of the request's tools")
        tool, shown = self._by_name[name], dict[str, object](name=name)
        if name not in self._found:
            shown |= {"description": tool.text("description"), "parameters": tool.object("input_schema")}
        self._found.add(name)
        return f"<function>{json_text(shown, tool.name_of('input_schema'))}</function>"

    def callable(self) -> Iterator[Tool]:
        """Yield the tools that may be called, once all messages have been read. Raises InvalidParameter."""
        for name, declared in self._custom:
            tool = read_function(declared, "input_schema")
            tool.hidden = self._may_defer and declared.flag("defer_loading")
            if not tool.hidden or name in self._found:
                yield tool


def _read_choice(choice: Body, chat: Chat) -> None:
    kind = choice.required_text("type")
    if kind == "tool":
        name = choice.required_text("name")
        chat.tool_choice.name = check_chosen(name, chat.tools, choice.name_of("name"))
    elif kind in _MODES:
        chat.tool_choice.mode = _MODES[kind]
    else:
        raise choice.wrong("type", "must be one of auto, any, tool, none")
    if choice.flag("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False


def _session(user_id: str) -> str:
    """Return the session that Claude Code puts into user_id, or "". Other clients put a person there, who has
    many conversations."""
    _, mark, session = user_id.rpartition(_SESSION)
    if mark and _SESSION_ID.fullmatch(session):
        return session
    try:
        return check_text(json.loads(user_id)["session_id"], "session_id")
    except (ValueError, RecursionError, LookupError, TypeError, InvalidParameter):
        return ""


_TURN_ROLES = ("user", "assistant", "system")
# Claude Code's system prompt begins with a line whose hash changes with each call, so that no prefix would
# ever be reused.
_BILLING = "x-anthropic-billing-header:"
_ERROR = "Error: "  # This marks a result that is an error: templates have no other place for that.


def read_turns(body: Body, tools: _Tools) -> list[ChatMessage]:
    messages = body.objects("messages")
    if not messages:
        raise body.wrong("messages", "must be a list of at least one message")
    turns = [*_system(body), *(turn for message in messages for turn in _read_message(message, tools))]
    if turns[-1].role == "assistant" and turns[-1].tool_calls:
        raise messages[-1].wrong("content", "must not have tool_use where the answer goes on with it")
    return turns


def _system(body: Body) -> list[ChatMessage]:
    parts = [part for part in map(_without_billing, _texts(body, "system")) if part]
    return [ChatMessage(role="system", parts=parts)] if parts else []


def _without_billing(part: str) -> str:
    return part.partition("\n")[2] if part.startswith(_BILLING) else part


def _read_message(message: Body, tools: _Tools) -> Iterator[ChatMessage]:
    role = message.required_text("role")
    if role not in _TURN_ROLES:
        raise message.wrong("role", f"must be one of {', '.join(_TURN_ROLES)}")
    if isinstance(message.get("content"), str):
        return iter([ChatMessage(role=role, content=message.text("content"))])
    blocks = message.objects("content")
    if not blocks and role != "assistant":
        raise message.wrong("content", "must be a string or at least one block")
    return iter([_model_turn(blocks)]) if role == "assistant" else _other_turns(role, blocks, tools)


def _other_turns(role: str, blocks: list[Body], tools: _Tools) -> Iterator[ChatMessage]:
    for kind, group in groupby(blocks, key=lambda block: block.required_text("type")):
        if kind == "tool_result" and role == "user":
            yield from (_result(block, tools) for block in group)
        else:
            yield ChatMessage(role=role, parts=[_text(block) for block in group])


def _result(block: Body, tools: _Tools) -> ChatMessage:
    parts = _result_parts(block, tools)
    if block.flag("is_error"):
        parts = [_ERROR + "".join(parts[:1]), *parts[1:]]
    content = parts[0] if len(parts) == 1 else ""
    return ChatMessage(
        role="tool",
        tool_call_id=block.required_text("tool_use_id"),
        content=content,
        parts=parts if len(parts) > 1 else [],
    )


_REFERENCE = "tool_reference"


def _result_parts(block: Body, tools: _Tools) -> list[str]:
    """Return the texts of a result. References behind each other are one text: the tools that they name."""
    if isinstance(block.get("content"), str):
        return _texts(block, "content")
    parts: list[str] = []
    for kind, group in groupby(block.objects("content"), key=lambda part: part.required_text("type")):
        if kind == _REFERENCE:
            shown = map(tools.shown, group)
            parts.append("\n".join(("<functions>", *shown, "</functions>")))
        else:
            parts += map(_text, group)
    return parts


def _model_turn(blocks: list[Body]) -> ChatMessage:
    turn, texts, thoughts = ChatMessage(role="assistant"), [], []
    for block in blocks:
        kind = block.required_text("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
            turn.answer_id = _handle(block.text("signature")) or turn.answer_id
        elif kind == "tool_use":
            turn.tool_calls.append(_call(block))
        else:
            texts.append(_text(block))
    turn.content, turn.reasoning = "".join(texts), "".join(thoughts)
    return turn


def _handle(signature: str) -> str:
    """Return the answer's handle, or "" for another server's: it may have begun the conversation."""
    return signature if is_id(signature) else ""


def _call(block: Body) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise block.wrong("input", "must be an object")
    return ToolCall(
        id=block.required_text("id"),
        name=block.required_text("name"),
        arguments=json_text(arguments, block.name_of("input")),
    )


def _texts(holder: Body, name: str) -> list[str]:
    value = holder.get(name)
    if isinstance(value, str):
        return [check_text(value, holder.name_of(name))]
    return [_text(block) for block in holder.objects(name)]


def _text(block: Body) -> str:
    kind = block.required_text("type")
    if kind != "text":
        raise block.wrong("type", f"is {kind!r}, which this server does not read here; it reads text")
    return block.required_text("text")
