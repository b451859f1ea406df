"""This module reads bodies of OpenAI's chat completions and completions into GenerateRequest.

It ignores unknown parameters, except those in refused.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.router.dialects import refused
from services.router.dialects.body_params import (
    check_number,
    one_for_each,
    read_best_of,
    read_constraint,
    read_function,
    read_n,
)
from services.router.dialects.choice_formats import NO_ECHO, Echo, read_prompt_logprobs
from services.router.dialects.dialect import Call, read_addressee, traceparent_of
from services.router.dialects.json_body import (
    UINT32_MAX,
    Body,
    InvalidParameter,
    check_ids,
    check_text,
    json_text,
)
from services.router.dialects.sampling import read_sampling
from services.wire.isthmus.v1.generation_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    ToolCall,
    ToolChoice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiCall(Call):
    include_usage: bool
    usage_in_chunks: bool  # Each chunk reports the usage so far, as with vLLM.
    return_token_ids: bool  # The ids of prompts are returned, too.
    echo: Echo = NO_ECHO

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.request.sampling.HasField("logprobs"))

    @property
    def streams_text_alone(self) -> bool:
        has_more = self.wants_logprobs or self.return_token_ids or self.usage_in_chunks
        return not (has_more or self.echo != NO_ECHO)


def make_call(
    body: Body, headers: Mapping[str, str], request: GenerateRequest, *, echoes: bool = False
) -> OpenAiCall:
    read_addressee(body, headers, request, body.text("prompt_cache_key"))
    stream, return_token_ids = body.flag("stream"), body.flag("return_token_ids")
    options = _read_stream_options(body.get("stream_options"), stream)
    include_usage = options.flag("include_usage")
    usage_in_chunks = options.flag("continuous_usage_stats") and include_usage
    named = read_constraint(body)
    if named is not None:
        request.sampling.constraint.CopyFrom(named.constraint)
    return OpenAiCall(
        request=request,
        stream=stream,
        traceparent=traceparent_of(headers),
        include_usage=include_usage,
        usage_in_chunks=usage_in_chunks,
        constraint_param=named.param if named is not None else "",
        return_token_ids=return_token_ids,
        reports_prompt=return_token_ids or usage_in_chunks,
        echo=read_prompt_logprobs(body, request, echoes=echoes),
    )


def _read_stream_options(stream_options: object, stream: bool) -> Body:
    if stream_options is None:
        return Body({})
    if not stream:
        raise InvalidParameter("stream_options", "needs stream to be true")
    if not isinstance(stream_options, dict):
        raise InvalidParameter("stream_options", "must be an object")
    return Body(stream_options, "stream_options.")


_MODES = {
    "auto": ToolChoice.MODE_AUTO,
    "none": ToolChoice.MODE_NONE,
    "required": ToolChoice.MODE_REQUIRED,
}


def read_tools(body: Body, chat: Chat) -> None:
    chat.tools.extend(read_function(_function(tool)) for tool in body.objects("tools"))
    _read_choice(body, chat)
    if body.get("parallel_tool_calls") is not None:
        chat.parallel_tool_calls = body.flag("parallel_tool_calls")


def _read_choice(body: Body, chat: Chat) -> None:
    value = body.get("tool_choice")
    if isinstance(value, str) and value in _MODES:
        chat.tool_choice.mode = _MODES[value]
    elif isinstance(value, dict):
        chat.tool_choice.name = _function(body.inner("tool_choice")).required_text("name")
    elif value is not None:
        raise body.wrong("tool_choice", f"must be one of {', '.join(_MODES)}, or name a function")


def _read_call(call: Body) -> ToolCall:
    function = _function(call)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # Some clients send an object.
        text = json_text(arguments, function.name_of("arguments"))
    else:
        text = function.text("arguments")
    return ToolCall(id=call.text("id"), name=function.required_text("name"), arguments=text)


def _function(holder: Body) -> Body:
    if (holder.text("type") or "function") != "function":
        raise holder.wrong("type", 'must be "function"; this server knows no other')
    if holder.get("function") is None:
        raise holder.wrong("function", "must be an object")
    return holder.inner("function")


def read_chat_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> OpenAiCall:
    body = Body(fields)
    body.refuse(refused.IN_CHATS, refused.INSTEAD)
    max_tokens = body.max_tokens("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.max_tokens("max_tokens")
    sampling = read_sampling(body, max_tokens, _read_chat_logprobs(body))
    chat = Chat(messages=_read_messages(body), chat_template_kwargs=_read_template_kwargs(body))
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
    """Return the template's variables as JSON. A reasoning_effort is one of them, as with vLLM and SGLang;
    "none" turns thinking off."""
    name, effort = "chat_template_kwargs", body.text("reasoning_effort")
    variables: dict[str, object] = {"reasoning_effort": effort} if effort else {}
    if effort == "none":
        variables["enable_thinking"] = False
    variables |= body.object(name)
    return json_text(variables, name) if variables else ""


def _read_messages(body: Body) -> list[ChatMessage]:
    if not isinstance(body.get("messages"), list) or not body.get("messages"):
        raise body.wrong("messages", "must be a list of at least one message")
    return [_read_message(message) for message in body.objects("messages")]


def _read_message(message: Body) -> ChatMessage:
    if message.get("function_call"):
        raise message.wrong("function_call", "is not supported by this server; use tool_calls")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise message.wrong("content", "must be a string or a list of text parts")
    parts = message.items("content") if isinstance(content, list) else []
    name = message.name_of("content")
    return ChatMessage(
        role=message.required_text("role"),
        content="" if isinstance(content, list) else message.text("content"),
        parts=[_read_text_part(part, f"{name}[{index}]") for index, part in enumerate(parts)],
        token_ids=message.integers("token_ids"),
        reasoning=message.text("reasoning_content") or message.text("reasoning"),
        tool_calls=map(_read_call, message.objects("tool_calls")),
        tool_call_id=message.text("tool_call_id"),
        name=message.text("name"),
    )


def _read_text_part(part: object, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidParameter(name, 'must be a part of type "text"; this server reads no other')
    return check_text(part.get("text"), f"{name}.text")


_OF_MESSAGES = ("prefix", "partial")


def read_continuing(body: Body) -> bool:
    """Return whether the answer continues the last message of the chat. Raises InvalidParameter.

    continue_final_message    The body has it, with add_generation_prompt: false (vLLM, SGLang).
    prefix, partial           The last message has it (DeepSeek and Mistral; Moonshot and Qwen).
    """
    continues = body.flag("continue_final_message")
    adds_prompt = body.flag("add_generation_prompt")
    if adds_prompt and continues:
        raise body.wrong("add_generation_prompt", "must be false beside continue_final_message")
    continues = continues or _is_requested_by_messages(body)
    if body.get("add_generation_prompt") is False and not continues:
        raise body.wrong("add_generation_prompt", "must be true without continue_final_message")
    return continues


def _is_requested_by_messages(body: Body) -> bool:
    items = body.items("messages")
    if not any(isinstance(item, dict) and not item.keys().isdisjoint(_OF_MESSAGES) for item in items):
        return False
    messages = body.objects("messages")
    requesting = [(message, name) for message in messages for name in _OF_MESSAGES if message.flag(name)]
    for message, name in requesting:
        if message is not messages[-1]:
            raise message.wrong(name, "must be of the last message: an answer goes on with no other")
    return bool(requesting)


_DEFAULT_MAX_TOKENS = 16  # This is OpenAI's own; chats run until they end.


def read_completion_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> OpenAiCall:
    body = Body(fields)
    body.refuse(refused.IN_COMPLETIONS, refused.INSTEAD)
    max_tokens = body.max_tokens("max_tokens")
    if max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    echoes = body.flag("echo")
    only_prompt = echoes and max_tokens == 0
    max_tokens = 1 if only_prompt else max_tokens
    sampling = read_sampling(body, max_tokens, body.integer("logprobs", 0, UINT32_MAX))
    request = GenerateRequest(sampling=sampling)
    if body.get("add_special_tokens") is not None:
        request.add_special_tokens = body.flag("add_special_tokens")
    read_n(body, request)
    read_best_of(body, request, body.flag("stream"))
    call = make_call(body, headers, request, echoes=echoes)
    first, *others = _read_prompts(fields.get("prompt"), call.request)
    return replace(call, request=first, more=tuple(others), echo=replace(call.echo, only=only_prompt))


def _read_prompts(value: object, request: GenerateRequest) -> list[GenerateRequest]:
    prompts = {"prompt": value}
    if isinstance(value, list) and _is_of_prompts(value):
        check_number(len(value), "prompt")
        prompts = {f"prompt[{place}]": each for place, each in enumerate(value)}
    requests = one_for_each(len(prompts), request, "prompt")
    for each, (name, prompt) in zip(requests, prompts.items(), strict=True):
        _put_prompt(prompt, name, each)
    return requests


def _is_of_prompts(values: list[object]) -> bool:
    """Return whether the list holds prompts. A list of ids may be very long, so the first item is looked
    at first."""
    return isinstance(next(iter(values), None), str | list) and set(map(type, values)) in ({str}, {list})


def _put_prompt(value: object, name: str, request: GenerateRequest) -> None:
    if isinstance(value, str):
        request.text = check_text(value, name)
        return
    request.token_ids.SetInParent()  # This sets an empty list, too.
    request.token_ids.ids.extend(_ids_of(value, name))


def _ids_of(value: object, name: str) -> list[int]:
    try:
        return check_ids(value, name)
    except InvalidParameter:
        if isinstance(value, list) and {str, list}.isdisjoint(map(type, value)):
            raise
        problem = "must be a string, a list of token ids, or a list of either"
        raise InvalidParameter(name, problem) from None
