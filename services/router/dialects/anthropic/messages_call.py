"""Bodies of Anthropic's messages are read into GenerateRequest.

What only says how to cache (cache_control, betas, metadata) changes no answer and is left aside: the router
caches whatever comes twice.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.router.dialects.anthropic.message_turns import read_turns
from services.router.dialects.dialect_call import Call, read_addressee, traceparent_of
from services.router.dialects.flat_tools import check_chosen, read_function
from services.router.dialects.json_body import INT32_MAX, Body, InvalidParameter, Refused, check_text
from services.router.dialects.openai import refused
from services.router.dialects.openai.constraint_params import NamedConstraint, read_constraint, read_schema
from services.router.dialects.sampling import read_sampling, read_stop
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.router.dialects.template_variables import read_variables
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, GenerateRequest, ToolChoice

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
    shows_thinking: bool  # Where nobody requests thinking, it is no part of the answer.
    omits_thinking: bool  # Thinking is a part, but without its text.


def read_messages_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> MessagesCall:
    body = Body(fields)
    body.refuse(_REFUSED, _INSTEAD)
    if body.get("max_tokens") is None:
        raise body.wrong("max_tokens", "must be set")
    return _read_call(body, headers, _read_sampling(body, defaults))


def read_count_request(fields: Mapping[str, object], headers: Mapping[str, str]) -> GenerateRequest:
    """Read count_tokens' body, which is a message's, though most of it may be missing. Raises
    InvalidParameter."""
    return _read_call(Body(fields), headers, SamplingParams()).request


def _read_sampling(body: Body, defaults: SamplingDefaults) -> SamplingParams:
    sampling = read_sampling(body, body.integer("max_tokens", 1, INT32_MAX), None, defaults)
    sampling.stop.extend(read_stop(body.get("stop_sequences"), "stop_sequences"))
    return sampling


def _read_format(body: Body) -> NamedConstraint | None:
    """Return the constraint. `output_format` is what it was called while it was a beta."""
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
    chat = Chat(
        messages=read_turns(body),
        chat_template_kwargs=read_variables(body, _THINKS[kind], body.inner("output_config").text("effort")),
    )
    chat.continue_final_message = chat.messages[-1].role == "assistant"
    left_out = _read_tools(body, chat)
    if (named := read_constraint(body, _read_format(body))) is not None:
        sampling.constraint.CopyFrom(named.constraint)
    request = GenerateRequest(chat=chat, sampling=sampling)
    read_addressee(body, headers, request, _session(body.inner("metadata").text("user_id")))
    return MessagesCall(
        request=request,
        stream=body.flag("stream"),
        traceparent=traceparent_of(headers),
        left_out=left_out,
        constraint_param="" if named is None else named.param,
        shows_thinking=_THINKS[kind] is not False,
        omits_thinking=thinking.text("display") == "omitted",
    )


def _read_tools(body: Body, chat: Chat) -> tuple[str, ...]:
    """Put in the functions, and return the kinds of tools that this server cannot serve: a model that is not
    shown them does without."""
    left_out = []
    for tool in body.objects("tools"):
        kind = tool.text("type") or "custom"
        if kind == "custom":
            chat.tools.append(read_function(tool, "input_schema"))
        else:
            left_out.append(kind)
    if body.get("tool_choice") is not None:
        _read_choice(body.inner("tool_choice"), chat)
    return tuple(left_out)


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
    """Return the session that Claude Code names there. What others name is a person, who has many
    conversations."""
    _, mark, session = user_id.rpartition(_SESSION)
    if mark and _SESSION_ID.fullmatch(session):
        return session
    try:
        return check_text(json.loads(user_id)["session_id"], "session_id")
    except (ValueError, RecursionError, LookupError, TypeError, InvalidParameter):
        return ""
