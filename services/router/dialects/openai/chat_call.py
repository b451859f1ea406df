"""Bodies of OpenAI's chat completions are read into GenerateRequest.

Parameters that we do not know are ignored, but for those of refused.py.
"""

import json
from collections.abc import Mapping

from services.router.dialects.answer_counts import read_n
from services.router.dialects.json_body import (
    UINT32_MAX,
    Body,
    InvalidParameter,
    check_ids,
    check_list,
    check_text,
)
from services.router.dialects.openai import refused
from services.router.dialects.openai.chat_tools import read_calls, read_tools
from services.router.dialects.openai.openai_call import OpenAiCall, make_call
from services.router.dialects.sampling import read_sampling
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest


def read_chat_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> OpenAiCall:
    body = Body(fields)
    body.refuse(refused.IN_CHATS, refused.INSTEAD)
    max_tokens = body.max_tokens("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.max_tokens("max_tokens")
    sampling = read_sampling(body, max_tokens, _read_chat_logprobs(body), defaults)
    chat = Chat(
        messages=_read_messages(fields.get("messages")), chat_template_kwargs=_read_template_kwargs(body)
    )
    read_tools(body, chat)
    chat.continue_final_message = read_continuing(body)
    request = GenerateRequest(chat=chat, sampling=sampling)
    read_n(body, request)
    return make_call(body, headers, request)


def _read_chat_logprobs(body: Body) -> int | None:
    top_logprobs = body.integer("top_logprobs", 0, UINT32_MAX)
    if body.flag("logprobs"):
        return top_logprobs or 0
    if top_logprobs:  # A 0 requests none.
        raise InvalidParameter("top_logprobs", "needs logprobs to be true")
    return None


def _read_template_kwargs(body: Body) -> str:
    """Return the template's variables as JSON. A reasoning_effort is one of them, as it is with vLLM and
    SGLang; "none" switches thinking off."""
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
        return check_text(json.dumps(variables, ensure_ascii=False), name) if variables else ""
    except RecursionError as error:
        raise InvalidParameter(name, "is nested too deeply") from error


def _read_messages(value: object) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise InvalidParameter("messages", "must be a list of at least one message")
    items = check_list(value, "messages")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(items)]


def _read_message(value: object, name: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidParameter(name, "must be an object")
    if value.get("function_call"):
        raise InvalidParameter(f"{name}.function_call", "is not supported by this server; use tool_calls")
    token_ids = value.get("token_ids")
    content = _read_content(value.get("content"), f"{name}.content")
    return ChatMessage(
        role=check_text(value.get("role"), f"{name}.role"),
        content=content if isinstance(content, str) else "",
        parts=content if isinstance(content, list) else [],
        token_ids=[] if token_ids is None else check_ids(token_ids, f"{name}.token_ids"),
        reasoning=_read_optional(value, "reasoning_content", name)
        or _read_optional(value, "reasoning", name),
        tool_calls=read_calls(value.get("tool_calls"), f"{name}.tool_calls"),
        tool_call_id=_read_optional(value, "tool_call_id", name),
        name=_read_optional(value, "name", name),
    )


def _read_optional(message: Mapping[str, object], key: str, name: str) -> str:
    value = message.get(key)
    return "" if value is None else check_text(value, f"{name}.{key}")


def _read_content(value: object, name: str) -> str | list[str]:
    if value is None:
        return ""
    if isinstance(value, list):
        parts = check_list(value, name)
        return [_read_text_part(part, f"{name}[{index}]") for index, part in enumerate(parts)]
    if isinstance(value, str):
        return check_text(value, name)
    raise InvalidParameter(name, "must be a string or a list of text parts")


def _read_text_part(part: object, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidParameter(name, 'must be a part of type "text"; this server reads no other')
    return check_text(part.get("text"), f"{name}.text")


_OF_MESSAGES = ("prefix", "partial")


def read_continuing(body: Body) -> bool:
    """Return whether an answer goes on with the last message of a chat. Raises InvalidParameter.

    continue_final_message    of the body, with add_generation_prompt: false (vLLM, SGLang)
    prefix, partial           of the last message (DeepSeek and Mistral; Moonshot and Qwen)
    """
    continues = body.flag("continue_final_message")
    begins = body.flag("add_generation_prompt")
    if begins and continues:
        raise body.wrong("add_generation_prompt", "must be false beside continue_final_message")
    continues = continues or _is_asked_by_messages(body)
    if body.get("add_generation_prompt") is False and not continues:
        raise body.wrong("add_generation_prompt", "must be true without continue_final_message")
    return continues


def _is_asked_by_messages(body: Body) -> bool:
    items = body.items("messages")
    if not any(isinstance(item, dict) and not item.keys().isdisjoint(_OF_MESSAGES) for item in items):
        return False
    messages = body.objects("messages")
    asking = [(message, name) for message in messages for name in _OF_MESSAGES if message.flag(name)]
    for message, name in asking:
        if message is not messages[-1]:
            raise message.wrong(name, "must be of the last message: an answer goes on with no other")
    return bool(asking)
